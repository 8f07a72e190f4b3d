"""The paper's 16 cases run both ways with one plan: by our engine, and by torch's own point-to-point operations on gloo. Needs root.

    crossmesh launch -n 20 --per-host 4 --emulate 400Mbit -- python3 bench/python/both_ways.py [--nic 400Mbit] [--tensor-bytes 67108864]

Five hosts of four ranks hold every case: the meshes of a case take the first ranks of as many hosts as they have. Tensors are shrunk as by
`crossmesh bench reshard`: the last dim. Every element is compared, both ways. Rank 0 prints a table and a line of JSON a case.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import time
import tomllib

import torch
import torch.distributed as dist

import crossmesh as cm

SUITE = pathlib.Path(__file__).resolve().parents[2] / "crates/cli/suites/paper.toml"
PER_HOST = 4


def placed(text, first_host, limit):
    """A layout of the suite on hosts from one on, shrunk; and how many hosts it has."""
    shape, mesh, hosts, gpus, dims = re.fullmatch(r"i32\[([\d,]+)\]@(\w)\{host:(\d+),gpu:(\d+)\}(\(.*\))", text).groups()
    shape, hosts, gpus = [int(n) for n in shape.split(",")], int(hosts), int(gpus)
    row = 4
    for n in shape[:-1]:
        row *= n
    shape[-1] = min(shape[-1], limit // row)
    ranks = ",".join(str(PER_HOST * (first_host + host) + gpu) for host in range(hosts) for gpu in range(gpus))
    return cm.Layout.parse(f"i32[{','.join(map(str, shape))}]@{mesh}{{host:{hosts},gpu:{gpus}}}={ranks}{dims}"), hosts


def cut(layout, rank):
    """What a rank holds: elements are numbered."""
    (box,) = layout.boxes(rank)
    total = torch.zeros([1] * len(box), dtype=torch.int32)
    step = 1
    for dim in reversed(range(len(box))):
        at = torch.arange(*box[dim], dtype=torch.int32) * step
        total = total + at.view([-1 if d == dim else 1 for d in range(len(box))])
        step *= layout.shape[dim]
    return total.contiguous()


def timed(work):
    dist.barrier()
    start = time.monotonic()
    work()
    spans = [None] * dist.get_world_size()
    dist.all_gather_object(spans, (start, time.monotonic()))
    return max(end for _, end in spans) - min(start for start, _ in spans)


def one_case(job, case, args):
    src, hosts = placed(case["src"], 0, args.tensor_bytes)
    dst, _ = placed(case["dst"], hosts, args.tensor_bytes)
    plan = cm.plan({"w": (src, dst)}, cluster=job.cluster, nic=args.nic)
    mine = {"w": cut(src, job.rank)} if src.holds(job.rank) else {}
    shape = dst.shard_shape(job.rank) if dst.holds(job.rank) else None
    expected = cut(dst, job.rank) if shape else None
    ours, theirs = [], []
    for _ in range(args.repeat):
        for times, move in ((ours, lambda out: job.run(plan, mine, out)), (theirs, lambda out: cm.torch.reshard(plan, mine, out))):
            out = {"w": torch.full(shape, -1, dtype=torch.int32)} if shape else {}
            times.append(timed(lambda: move(out)))
            assert shape is None or torch.equal(out["w"], expected), f"{case['name']}: wrong on rank {job.rank}"
    return plan, ours, theirs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nic", default="400Mbit", help="what the hosts have, for the bound")
    parser.add_argument("--tensor-bytes", type=int, default=64 << 20)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--case", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "nic")
    dist.init_process_group("gloo")
    job = cm.init(address=f"{os.environ['MASTER_ADDR']}:7078")
    ratios = []
    for case in tomllib.loads(SUITE.read_text())["case"]:
        if args.case not in case["name"]:
            continue
        plan, ours, theirs = one_case(job, case, args)
        if job.rank == 0:
            bound, engine, torch_way = plan.lower_bound_s, statistics.median(ours), statistics.median(theirs)
            ratios.append(torch_way / engine)
            print(f"{case['name']:<12} bound {bound:6.3f} s  engine {engine:6.3f} s ({engine / bound:.3f})  torch {torch_way:6.3f} s  {ratios[-1]:.3f} x", flush=True)
            print(json.dumps({"case": case["name"], "bound_s": bound, "engine_s": ours, "torch_s": theirs}), flush=True)
    if job.rank == 0:
        print(f"torch's way takes {min(ratios):.3f} to {max(ratios):.3f} times as long as the engine", flush=True)
    job.close()
    dist.barrier()
    os._exit(0)  # gloo's own teardown may hang when peers leave first


if __name__ == "__main__":
    main()
