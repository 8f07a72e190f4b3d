"""Ours and torch gloo's on the same cases, in the same emulated cluster, one table. Needs root and torch.

    sudo python3 bench/peers/side_by_side.py [--crossmesh target/release/crossmesh] [--case 'n-to-m 1'] [--rate 400Mbit]

The cases are those of `crossmesh bench reshard`, shrunk the same way: the last dim, until a tensor has 64 MiB.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
BYTES = {"i8": 1, "u8": 1, "f16": 2, "bf16": 2, "f32": 4, "i32": 4, "f64": 8, "i64": 8}


def shrunk(layout, limit):
    dtype, rest = layout.split("[", 1)
    shape, rest = rest.split("]", 1)
    dims = [int(dim) for dim in shape.split(",")]
    row = BYTES[dtype]
    for dim in dims[:-1]:
        row *= dim
    dims[-1] = min(dims[-1], limit // row)
    return f"{dtype}[{','.join(map(str, dims))}]{rest}"


def output(command, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **more)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def ours(args, src, dst):
    command = [args.crossmesh, "run", src, dst, "--emulate", args.rate, "--repeat", str(args.repeat)]
    return json.loads(output(command + ["--format", "json"]))


def gloo(args, plan_path, method):
    plan = json.loads(pathlib.Path(plan_path).read_text())
    per_host = {}
    for device in plan["devices"]:
        per_host[device["host"]] = per_host.get(device["host"], 0) + 1
    counts = ",".join(str(count) for _, count in sorted(per_host.items()))
    command = [args.crossmesh, "launch", "-n", str(len(plan["devices"])), "--per-host", counts]
    command += ["--emulate", args.rate, "--", sys.executable, str(HERE / "gloo_reshard.py")]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "nic"}
    text = output(command + [plan_path, method, str(args.repeat)], env=env)
    line = next(line for line in text.splitlines() if line.startswith('[0] {"method"'))
    return statistics.median(json.loads(line[4:])["measured_s"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crossmesh", default="target/release/crossmesh")
    parser.add_argument("--suite", default=str(HERE.parent.parent / "crates/cli/suites/paper.toml"))
    parser.add_argument("--case", default="")
    parser.add_argument("--rate", default="400Mbit")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tensor-bytes", type=int, default=64 << 20)
    args = parser.parse_args()
    suite = tomllib.loads(pathlib.Path(args.suite).read_text())
    cases = [case for case in suite["case"] if args.case in case["name"]]
    width = "{:<12} {:>8} {:>10} {:>8} {:>14} {:>15} {:>10}"
    print(width.format("case", "bound", "crossmesh", "× bound", "gloo sendrecv", "gloo broadcast", "× faster"))
    for case in cases:
        src, dst = (shrunk(case[key], args.tensor_bytes) for key in ("src", "dst"))
        with tempfile.TemporaryDirectory() as folder:
            plan = os.path.join(folder, "plan.json")
            output([args.crossmesh, "plan", src, dst, "--nic", args.rate, "--strategy", "sendrecv", "-o", plan])
            mine = ours(args, src, dst)
            theirs = {method: gloo(args, plan, method) for method in ("sendrecv", "broadcast")}
        median, bound = mine["median_s"], mine["lower_bound_s"]
        faster = f"{theirs['sendrecv'] / median:.1f}, {theirs['broadcast'] / median:.1f}"
        times = [f"{theirs[method]:.2f} s" for method in ("sendrecv", "broadcast")]
        print(width.format(case["name"], f"{bound:.2f} s", f"{median:.2f} s", f"{median / bound:.3f}", *times, faster))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
