"""Whole models planned together, 256 devices to 128, under a limit on extra memory: how long planning takes, and how near the bound the plan is.

    python3 bench/python/planning.py [--max-extra-bytes 256MiB]

Planned and simulated, not run. Times are this process's own processor time and, behind it, the clock's.
"""

import argparse
import json
import time

import crossmesh as cm

# Of the size and proportions of models with a trillion weights of today; the name is that of a config we know.
TRILLION = dict(
    model_type="qwen3_moe", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_attention_heads=64,
    num_key_value_heads=8, head_dim=128, num_hidden_layers=60, num_experts=384, vocab_size=163840, torch_dtype="bfloat16",
)
CASES = {
    "llama3-70b": (lambda: cm.models.llama3("70B"), "fsdp 256", "dp 16, tp 8"),
    "llama3-70b, fsdp x tp": (lambda: cm.models.llama3("70B"), "fsdp 32, tp 8", "dp 16, tp 8"),
    "1T experts, to tp x ep": (lambda: cm.models.from_config(TRILLION), "fsdp 8, ep 32", "tp 8, ep 16"),
    "1T experts, to ep": (lambda: cm.models.from_config(TRILLION), "fsdp 8, ep 32", "dp 1, ep 128"),
}


def one(name, make, src, dst, limit):
    model = make()
    cpu, clock = time.process_time(), time.perf_counter()
    plan = cm.models.model_plan(model, src, dst, fused=True, nics=8, nic="400Gbit", max_extra_bytes=limit)
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    said = {"case": name, "parameters": model.parameters, "src": src, "dst": dst, "tensors": len(plan.tensors)}
    said |= {"transfers": plan.num_transfers, "plan_s": round(cpu, 2), "clock_s": round(clock, 2), "bound_s": round(plan.lower_bound_s, 4)}
    print(json.dumps(said), flush=True)
    # Proven and simulated: of a plan of many messages that takes far longer than to make it.
    start = time.process_time()
    said = {"case": name, "gap": round(plan.gap, 4), "extra_bytes": plan.peak_extra_bytes}
    print(json.dumps(said | {"prove_and_simulate_s": round(time.process_time() - start, 1)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-extra-bytes", default="256MiB")
    parser.add_argument("--case", default="")
    args = parser.parse_args()
    for name, (make, src, dst) in CASES.items():
        if args.case in name:
            one(name, make, src, dst, args.max_extra_bytes)


if __name__ == "__main__":
    main()
