"""Ours and torch gloo's inside one machine, unshaped, in turns, one table.

    python3 bench/peers/local.py [--crossmesh target/release/crossmesh] [--ping target/release/examples/ping]
        [--python PYTHON_WITH_TORCH] [--turns 3]

A message of 1 KiB and one of 256 MiB from one process to another and back (half of it counts); an all-reduce of 64 MiB
over 4 processes; and, ours alone, 10,000 tensors of 4 KiB resharded together beside one tensor of as many bytes. `tcp` is
loopback, `shm` shared memory; gloo knows loopback only. Build first: cargo build --release -p crossmesh-cli -p
crossmesh-comm --example ping --bin crossmesh.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
NUM_SMALL, SMALL_BYTES = 10_000, 4096
KIB, MIB = 1 << 10, 1 << 20


def output(command):
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def median_of_rank_0(text):
    line = next(line for line in text.splitlines() if line.startswith("[0] {"))
    return json.loads(line[4:])["median_s"]


def launched(args, count, *command):
    return median_of_rank_0(output([args.crossmesh, "launch", "-n", str(count), "--", *map(str, command)]))


def ping(args, size, rounds):
    return {
        # Ranks that say they are on different hosts have only TCP.
        "tcp": lambda: launched(args, 2, "sh", "-c", f"CROSSMESH_HOST=h$RANK exec {args.ping} {size} {rounds}"),
        "shm": lambda: launched(args, 2, args.ping, size, rounds),
        "gloo": lambda: launched(args, 2, args.python, HERE / "gloo_ping.py", size, rounds),
    }


def all_reduce(args, size):
    def ours(devices_per_host):
        command = [args.crossmesh, "bench", "collective", "all-reduce", "-n", "4", "-b", str(size), "-e", str(size)]
        document = json.loads(output(command + ["--devices-per-host", str(devices_per_host), "--format", "json"]))
        return document["results"][0]["measured"]["median_s"]

    text = f"{size // MIB}MiB"
    gloo = lambda: launched(args, 4, args.python, HERE / "gloo_collective.py", "all-reduce", text, text, 2)
    return {"tcp": lambda: ours(1), "shm": lambda: ours(4), "gloo": gloo}


def reshard(args, folder, name, layouts):
    path = pathlib.Path(folder, name)
    path.write_text("".join(f"{layout}@A{{x:1}}(_) -> {layout}@B{{x:1}}(_)\n" for layout in layouts))
    one_host = pathlib.Path(folder, "one_host.toml")
    one_host.write_text("[[host]]\ndevices = 2\n")

    def ours(*more):
        command = [args.crossmesh, "run", "--pairs", str(path), "--repeat", "9", "--format", "json", *more]
        document = json.loads(output(command))
        assert document["verified"]
        return statistics.median(document["measured_s"])

    return {"tcp": ours, "shm": lambda: ours("--cluster", str(one_host))}


def measure(rows, turns):
    """Every cell once a turn, so that a slow minute of the machine hits all alike."""
    seconds = {}
    for _ in range(turns):
        for name, columns in rows.items():
            for column, run in columns.items():
                seconds.setdefault((name, column), []).append(run())
    return {key: statistics.median(values) for key, values in seconds.items()}


def show(rows, seconds):
    print(f"{'':<28} {'tcp':>12} {'shm':>12} {'gloo':>12}  gloo over tcp, shm")
    for name in rows:
        times = [seconds.get((name, column)) for column in ("tcp", "shm", "gloo")]
        cells = [f"{1e3 * t:9.3f} ms" if t else "" for t in times]
        over = [f"{times[2] / t:.2f}" for t in times[:2]] if times[2] else []
        print(f"{name:<28} {cells[0]:>12} {cells[1]:>12} {cells[2]:>12}  {', '.join(over)}")
    small, one = list(rows)[-2:]
    share = [f"{column} {100 * seconds[one, column] / seconds[small, column]:.0f} %" for column in ("tcp", "shm")]
    print(f"small tensors reach of one tensor's bandwidth: {', '.join(share)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crossmesh", default="target/release/crossmesh")
    parser.add_argument("--ping", default="target/release/examples/ping")
    parser.add_argument("--python", default=sys.executable, help="one that has torch")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    total = NUM_SMALL * SMALL_BYTES
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "1 KiB, one way": ping(args, KIB, 3000),
            "256 MiB, one way": ping(args, 256 * MIB, 5),
            "all-reduce 64 MiB, 4 ranks": all_reduce(args, 64 * MIB),
            f"{NUM_SMALL} tensors of {SMALL_BYTES} B": reshard(args, folder, "small", [f"u8[{SMALL_BYTES}]"] * NUM_SMALL),
            f"one tensor of {total} B": reshard(args, folder, "one", [f"u8[{total}]"]),
        }
        show(rows, measure(rows, args.turns))


if __name__ == "__main__":
    main()
