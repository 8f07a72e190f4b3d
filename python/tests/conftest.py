"""Programs that tests start are no tests: pytest does not import them."""

collect_ignore = ["both_ways.py", "smoke.py", "syncing.py"]
