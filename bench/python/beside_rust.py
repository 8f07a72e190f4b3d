"""``cm.plan`` beside the same plans by Rust, in turns: what the way from layouts to a plan costs in Python.

    pip install . && cargo bench -p crossmesh-core --bench planning --no-run && python3 bench/python/beside_rust.py [--rounds 3]

Rust's are the cases `problem_and_plan` of crates/core/benches/planning.rs, from layouts on, and Python's the same layouts: each round has a process of the one and a process of
the other, which plan each case five times. Printed are the least of all rounds, their ratio, and the median of the rounds' ratios.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time

# In the order in which Rust's bench has them: what a process has allocated before decides how much the next plan has to ask of the system.
CASES = {
    "1000 tensors, 256 to 128": [
        (f"bf16[{4096 + 128 * (i % 7)},4096]@A{{dp:32,d:8}}(dp+d,_)", f"bf16[{4096 + 128 * (i % 7)},4096]@B{{r:16,tp:8}}(tp,_)") for i in range(1000)
    ],
    "1024 chunks x 1024 chunks": [("f32[1000003,64]@A{h:128,d:8}(h+d,_)", "f32[1000003,64]@B{x:32,y:4,z:8}(z+x+y,_)")],
    "1024 chunks x 1024 chunks, crossing": [("f32[8192,8192]@A{h:128,d:8}(h+d,_)", "f32[8192,8192]@B{h:128,d:8}(_,h+d)")],
    "4096 devices to 4096": [("f32[65536,1024]@A{h:512,d:8}(h+d,_)", "f32[65536,1024]@B{h:512,d:8}(d,_)")],
}
SAMPLES = 5
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def in_rust():
    """By case: seconds of the fastest plan."""
    words = ["cargo", "bench", "-q", "-p", "crossmesh-core", "--bench", "planning", "--", "problem_and_plan"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = {case: re.search(re.escape(case) + r"\s+([\d.]+) (s|ms|µs)\s", said).groups() for case in CASES}
    return {case: float(number) * UNITS[unit] for case, (number, unit) in found.items()}


def in_python():
    words = [sys.executable, __file__, "--alone"]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def fastest(case):
    import crossmesh as cm

    pairs = {f"t{i}": tuple(map(cm.Layout.parse, both)) for i, both in enumerate(CASES[case])}
    taken = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        plan = cm.plan(pairs, devices_per_host=8)
        taken.append(time.perf_counter() - start)
        del plan
    return min(taken)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps({case: fastest(case) for case in CASES}))
        return
    rounds = [(in_rust(), in_python()) for _ in range(args.rounds)]
    for case in CASES:
        rust, python = ([side[case] for side in column] for column in zip(*rounds))
        median = statistics.median(ours / theirs for theirs, ours in zip(rust, python))
        least = min(python) / min(rust)
        print(f"{case:<36} Rust {1e3 * min(rust):9.2f} ms  cm.plan {1e3 * min(python):9.2f} ms  {least:.3f} x  median {median:.3f} x", flush=True)
        print(json.dumps({"case": case, "rust_s": rust, "python_s": python}), flush=True)


if __name__ == "__main__":
    main()
