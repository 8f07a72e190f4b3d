"""Ours, torch gloo's and OpenMPI's inside one machine, unshaped, in turns, one table.

    python3 bench/peers/local.py [--crossmesh target/release/crossmesh] [--ping target/release/examples/ping]
        [--python PYTHON_WITH_TORCH] [--turns 3] [--quick]

A message of 1 KiB and one of 256 MiB from one process to another and back (half of it counts); all-reduces of 1 KiB to 256 MiB
over 4 processes; and, ours alone, 10,000 tensors of 4 KiB resharded together beside one tensor of as many bytes. `tcp` is
loopback, `shm` shared memory; gloo knows loopback only. For the large ones also the processor time of all processes per GB
moved, beside iperf3's. What is not installed (torch, mpicc, iperf3) is left out, and said. Build first:
cargo build --release -p crossmesh-cli --bin crossmesh && cargo build --release -p crossmesh-comm --example ping.
"""

import argparse
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
NUM_SMALL, SMALL_BYTES = 10_000, 4096
KIB, MIB = 1 << 10, 1 << 20
SUMS = [(KIB, 1000), (64 * KIB, 300), (MIB, 60), (16 * MIB, 10), (64 * MIB, 5), (256 * MIB, 3)]
COLUMNS = ("tcp", "gloo", "mpi tcp", "shm", "mpi shm")


def output(command):
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def measured(text, moved):
    """Of every rank's line: the first rank's median, and all processors' seconds per GB."""
    lines = [json.loads(line.split(" ", 1)[1]) for line in text.splitlines() if line.startswith("[") and "] {" in line]
    assert lines, text
    processor = sum(line["processor_s"] for line in lines) / (moved / 1e9)
    return lines[0]["median_s"], processor


def launched(args, count, moved, *command):
    return measured(output([args.crossmesh, "launch", "-n", str(count), "--", *map(str, command)]), moved)


def mpirun(args, count, moved, how, *command):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    launch = ["mpirun", *root, "--oversubscribe", "--bind-to", "none", "--mca", "btl", how, "--mca", "pml", "ob1"]
    # With fewer cores than processes, one that waits has to let others have its core.
    launch += ["--mca", "mpi_yield_when_idle", "1", "--mca", "btl_tcp_if_include", "lo"]
    return measured(output([*launch, "-n", str(count), args.mpi, *map(str, command)]), moved)


def row(args, count, moved, *what):
    words = " ".join(map(str, what))
    cells = {
        # Ranks that say they are on different hosts have only TCP.
        "tcp": lambda: launched(args, count, moved, "sh", "-c", f"CROSSMESH_HOST=h$RANK exec {args.ping} {words}"),
        "shm": lambda: launched(args, count, moved, args.ping, *what),
    }
    if args.python:
        cells["gloo"] = lambda: launched(args, count, moved, args.python, HERE / "gloo_ping.py", *what)
    if args.mpi:
        cells["mpi tcp"] = lambda: mpirun(args, count, moved, "tcp,self", *what)
        cells["mpi shm"] = lambda: mpirun(args, count, moved, "vader,self", *what)
    return cells


def ping(args, size, rounds):
    return row(args, 2, 2 * size, size, rounds)


def all_reduce(args, size, rounds):
    """Over 4 ranks at least 6 times 1/4 of it has to leave each of them."""
    return row(args, 4, 4 * 1.5 * size, size, rounds, "all-reduce")


def iperf3():
    """Seconds of both processors per GB over loopback, one stream."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", port], stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    document = json.loads(output(["iperf3", "-c", "127.0.0.1", "-p", port, "-n", "4G", "-J"]))
    server.wait(timeout=30)
    end = document["end"]
    busy = (end["cpu_utilization_percent"]["host_total"] + end["cpu_utilization_percent"]["remote_total"]) / 100
    return busy * end["sum_received"]["seconds"] / (end["sum_received"]["bytes"] / 1e9)


def reshard(args, folder, name, layouts):
    path = pathlib.Path(folder, name)
    path.write_text("".join(f"{layout}@A{{x:1}}(_) -> {layout}@B{{x:1}}(_)\n" for layout in layouts))
    one_host = pathlib.Path(folder, "one_host.toml")
    one_host.write_text("[[host]]\ndevices = 2\n")

    def ours(*more):
        command = [args.crossmesh, "run", "--pairs", str(path), "--repeat", "9", "--format", "json", *more]
        document = json.loads(output(command))
        assert document["verified"]
        return statistics.median(document["measured_s"]), None

    return {"tcp": ours, "shm": lambda: ours("--cluster", str(one_host))}


def measure(rows, turns):
    """Every cell once a turn, so that a slow minute of the machine hits all alike."""
    seen = {}
    for _ in range(turns):
        for name, columns in rows.items():
            for column, run in columns.items():
                seen.setdefault((name, column), []).append(run())
    median = lambda values: statistics.median(values) if values[0] is not None else None
    return {key: tuple(median([v[i] for v in values]) for i in (0, 1)) for key, values in seen.items()}


def show_times(rows, seen):
    others = "gloo, mpi over tcp; gloo, mpi over shm"
    print("| | " + " | ".join(COLUMNS) + f" | {others} |\n|" + "---|" * (len(COLUMNS) + 2))
    for name in rows:
        times = {column: seen[name, column][0] for column in COLUMNS if (name, column) in seen}
        cells = [f"{1e3 * times[c]:.3f} ms" if c in times else "" for c in COLUMNS]
        pairs = [("gloo", "tcp"), ("mpi tcp", "tcp"), ("gloo", "shm"), ("mpi shm", "shm")]
        over = [f"{times[theirs] / times[ours]:.2f}" for theirs, ours in pairs if theirs in times]
        print(f"| {name} | " + " | ".join(cells) + f" | {', '.join(over)} |")


def show_processors(rows, seen, iperf):
    print("\nprocessor seconds per GB moved, of all processes\n\n| | " + " | ".join(COLUMNS) + " |\n|" + "---|" * 6)
    for name in rows:
        cells = [seen.get((name, column), (None, None))[1] for column in COLUMNS]
        if cells[0] is not None and "MiB" in name:
            print(f"| {name} | " + " | ".join(f"{c:.3f}" if c else "" for c in cells) + " |")
    if iperf:
        print(f"| iperf3, one stream | {iperf:.3f} | | | | |")


def build_mpi(folder):
    if not shutil.which("mpicc"):
        print("mpicc is not there: OpenMPI is left out", file=sys.stderr)
        return None
    path = pathlib.Path(folder, "mpi_local")
    subprocess.run(["mpicc", "-O2", "-o", str(path), str(HERE / "mpi_local.c")], check=True)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crossmesh", default="target/release/crossmesh")
    parser.add_argument("--ping", default="target/release/examples/ping")
    parser.add_argument("--python", default=sys.executable, help="one that has torch")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    args = parser.parse_args()
    if subprocess.run([args.python, "-c", "import torch"], capture_output=True).returncode != 0:
        print(f"{args.python} has no torch: gloo is left out", file=sys.stderr)
        args.python = None
    total = NUM_SMALL * SMALL_BYTES
    name = lambda size: f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
    with tempfile.TemporaryDirectory() as folder:
        args.mpi = build_mpi(folder)
        rows = {"1 KiB, one way": ping(args, KIB, 3000), "256 MiB, one way": ping(args, 256 * MIB, 5)}
        for size, rounds in SUMS if not args.quick else SUMS[::4]:
            rows[f"all-reduce of {name(size)}, 4 ranks"] = all_reduce(args, size, rounds)
        small, one = f"{NUM_SMALL} tensors of {SMALL_BYTES} B", f"one tensor of {total} B"
        rows[small] = reshard(args, folder, "small", [f"u8[{SMALL_BYTES}]"] * NUM_SMALL)
        rows[one] = reshard(args, folder, "one", [f"u8[{total}]"])
        seen = measure(rows, args.turns)
    show_times(rows, seen)
    share = [f"{c} {100 * seen[one, c][0] / seen[small, c][0]:.0f} %" for c in ("tcp", "shm")]
    print(f"\nsmall tensors reach of one tensor's bandwidth: {', '.join(share)}")
    show_processors(rows, seen, iperf3() if shutil.which("iperf3") else None)
    print(f"\nload averages at the end: {' '.join(f'{load:.1f}' for load in os.getloadavg())}")


if __name__ == "__main__":
    main()
