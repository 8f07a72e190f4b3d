"""Programs that tests start are no tests: pytest does not import them."""

collect_ignore = [
    "both_ways.py",
    "fsdp_modules.py",
    "nemo_rl_standin.py",
    "syncing.py",
    "trl_parts.py",
    "vllm_ranks.py",
    "wire.py",
]
