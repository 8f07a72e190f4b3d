"""Ours, torch gloo's and OpenMPI's on the same cases, in the same emulated cluster, one table. Needs root.

    sudo python3 bench/peers/side_by_side.py [--crossmesh target/release/crossmesh] [--suite paper] [--case 'n-to-m 1']
        [--rate 400Mbit] [--peers gloo,mpi] [--python PYTHON_WITH_TORCH] [--json FILE]

The cases are those of `crossmesh bench reshard`, shrunk the same way: the last dim, until a tensor has 64 MiB. Peers get
what a framework would ask of them: point-to-point messages all posted at once, or a broadcast per box (gloo_reshard.py,
mpi_reshard.c). A peer that is not installed is an error; leave it out with --peers.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
SUITES = HERE.parent.parent / "crates/cli/suites"
BYTES = {"i8": 1, "u8": 1, "f16": 2, "bf16": 2, "f32": 4, "i32": 4, "f64": 8, "i64": 8}
METHODS = ("sendrecv", "broadcast")
WIDTH = "{:<26} {:>8} {:>10} {:>8}"


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


def pairs_of(case, limit):
    """The case as a file of pairs for `crossmesh run --pairs`."""
    tensors = case.get("tensors") or [case]
    return "".join(f"{shrunk(t['src'], limit)} -> {shrunk(t['dst'], limit)}\n" for t in tensors)


def boxes_of(plan):
    """What point-to-point and broadcast move: bytes, the holder, then the receivers. By tensor, holder and region."""
    boxes = {}
    for transfer in plan["transfers"]:
        key = (transfer.get("tensor", 0), transfer["src"], json.dumps(transfer["region"]))
        boxes.setdefault(key, [transfer["bytes"], transfer["src"]]).append(transfer["dst"])
    return list(boxes.values())


def ranks_by_host(plan):
    hosts = {}
    for device in plan["devices"]:
        hosts[device["host"]] = hosts.get(device["host"], 0) + 1
    return [count for _, count in sorted(hosts.items())]


def measured(text):
    line = next(line for line in text.splitlines() if line.startswith('[0] {"method"'))
    return json.loads(line[4:])["measured_s"]


def ours(args, folder):
    command = [args.crossmesh, "run", "--pairs", f"{folder}/pairs", "--emulate", args.rate]
    return json.loads(output(command + ["--repeat", str(args.repeat), "--format", "json"]))


def gloo(args, folder, plan, method):
    counts = ranks_by_host(plan)
    command = [args.crossmesh, "launch", "-n", str(sum(counts)), "--per-host", ",".join(map(str, counts))]
    command += ["--emulate", args.rate, "--", args.python, str(HERE / "gloo_reshard.py")]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "nic"}
    return measured(output(command + [f"{folder}/boxes", method, str(args.peer_repeat)], env=env))


def mpi(args, folder, plan, method):
    counts = ranks_by_host(plan)
    with tempfile.TemporaryDirectory(prefix="crossmesh-mpi-") as job:
        lines = [f"h{host} slots={count}\n" for host, count in enumerate(counts)]
        pathlib.Path(job, "hostfile").write_text("".join(lines))
        command = [args.crossmesh, "launch", "-n", str(len(counts)), "--per-host", "1", "--emulate", args.rate]
        command += ["--", str(HERE / "mpi_host.sh"), job, str(len(counts)), "-n", str(sum(counts))]
        return measured(output(command + [args.mpi_program, f"{folder}/boxes", method, str(args.peer_repeat)]))


PEERS = {"gloo": gloo, "mpi": mpi}


def one_case(args, case):
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "pairs").write_text(pairs_of(case, args.tensor_bytes))
        command = [args.crossmesh, "plan", "--pairs", f"{folder}/pairs", "--nic", args.rate, "--strategy", "sendrecv"]
        output(command + ["-o", f"{folder}/plan.json"])
        plan = json.loads(pathlib.Path(folder, "plan.json").read_text())
        lines = [" ".join(map(str, box)) + "\n" for box in boxes_of(plan)]
        pathlib.Path(folder, "boxes").write_text("".join(lines))
        mine = ours(args, folder)
        theirs = {
            f"{peer} {method}": PEERS[peer](args, folder, plan, method) for peer in args.peers for method in METHODS
        }
    return {
        "case": case["name"],
        "lower_bound_s": mine["lower_bound_s"],
        "crossmesh": mine["measured_s"],
        "verified": mine["verified"],
        **theirs,
    }


def show(row, columns):
    bound, median = row["lower_bound_s"], statistics.median(row["crossmesh"])
    cells = WIDTH.format(row["case"], f"{bound:.2f} s", f"{median:.2f} s", f"{median / bound:.3f}")
    for column in columns:
        theirs = statistics.median(row[column])
        cells += f" {theirs:9.2f} s {theirs / median:5.2f}×"
    print(cells + ("" if row["verified"] else "  WRONG"), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crossmesh", default="target/release/crossmesh")
    parser.add_argument("--suite", default="paper")
    parser.add_argument("--case", default="", help="only the cases whose name contains this")
    parser.add_argument("--rate", default="400Mbit")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--peer-repeat", type=int, default=3)
    parser.add_argument("--peers", type=lambda text: [p for p in text.split(",") if p], default=["gloo", "mpi"])
    parser.add_argument("--python", default=sys.executable, help="one that has torch")
    parser.add_argument("--tensor-bytes", type=int, default=64 << 20)
    parser.add_argument("--json", help="also write every time that was measured, a line a case; lines are added")
    args = parser.parse_args()
    if unknown := set(args.peers) - set(PEERS):
        sys.exit(f"unknown peer {', '.join(sorted(unknown))}; peers are {', '.join(PEERS)}")
    suite = tomllib.loads((SUITES / f"{args.suite}.toml").read_text())
    cases = [case for case in suite["case"] if args.case in case["name"]]
    columns = [f"{peer} {method}" for peer in args.peers for method in METHODS]
    print(WIDTH.format("case", "bound", "crossmesh", "× bound") + "".join(f" {c:>18}" for c in columns), flush=True)
    with tempfile.TemporaryDirectory() as built:
        if "mpi" in args.peers:
            if not shutil.which("mpicc"):
                sys.exit("mpicc is not installed (Debian: openmpi-bin, libopenmpi-dev); or leave MPI out: --peers gloo")
            args.mpi_program = f"{built}/mpi_reshard"
            output(["mpicc", "-O2", "-o", args.mpi_program, str(HERE / "mpi_reshard.c")])
        rows = []
        for case in cases:
            rows.append(one_case(args, case))
            show(rows[-1], columns)
            if args.json:
                with open(args.json, "a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    best = [min(statistics.median(r[c]) for c in columns) / statistics.median(r["crossmesh"]) for r in rows if columns]
    if best:
        print(f"beside the best of {', '.join(columns)}: {min(best):.2f} to {max(best):.2f} times as fast")


if __name__ == "__main__":
    main()
