"""What a call from Python costs beside what it asks for, in two processes of this host.

    crossmesh launch -n 2 -- python3 bench/python/calls.py [--calls 2000]

- `start` and `wait` of a plan of one small tensor, less the time that the engine reports of it: the median over the calls. Between two
  ranks it holds what it takes the system to wake threads, on a busy machine most of it; a rank alone has none of that.
- `publish` of a shard of 50 MB in 200 tensors, uncast, beside one copy of as many bytes, in turns, and a copy only once the subscriber has installed
  the version: a copy beside another one is slow, and a bar for nobody. Medians, and the least of each. The copies are made by one thread, as `publish` is: torch's
  `copy_` of one tensor into another that has as many bytes, and libc's `memmove` of them.

What planning costs from Python: beside_rust.py.
"""

import argparse
import ctypes
import json
import os
import statistics
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed

import crossmesh as cm


def overhead(job, calls):
    """By kind of array: the median of a call, of the engine's part of it, and of the difference, in microseconds."""
    plan = cm.plan({"w": ("f32[64]@A{d:1}=0(_)", "f32[64]@B{d:1}=1(_)")})
    kinds = {"numpy": lambda: np.ones(64, np.float32), "torch": lambda: torch.ones(64), "ours": None}
    found = {}
    for kind, make in kinds.items():
        mine, out = plan.empty(job.rank, "src"), plan.empty(job.rank)
        if make:
            mine, out = {name: make() for name in mine}, {name: make() for name in out}
        taken = []
        for _ in range(calls):
            start = time.perf_counter()
            report = job.start(plan, mine, out).wait()
            taken.append((time.perf_counter() - start, report.seconds))
        taken = taken[calls // 10 :]
        middle = lambda values: round(1e6 * statistics.median(values), 1)  # noqa: E731
        found[kind] = (middle(t for t, _ in taken), middle(e for _, e in taken), middle(t - e for t, e in taken))
    return found


def alone(calls):
    """Microseconds of a call beyond the engine's, in a job of one rank: nobody else is waited for."""
    plan = cm.plan({"w": ("f32[64]@A{d:1}=0(_)", "f32[64]@B{d:1}=0(_)")})
    arrays = [{"w": np.ones(64, np.float32)} for _ in range(2)]
    beyond = []
    with cm.init(rank=0, size=1, address=f"127.0.0.1:{int(os.environ['MASTER_PORT']) + 2}") as job:
        for _ in range(calls):
            start = time.perf_counter()
            report = job.start(plan, *arrays).wait()
            beyond.append(time.perf_counter() - start - report.seconds)
    return round(1e6 * statistics.median(beyond[calls // 10 :]), 1)


def publishing(rank, turns):
    """Seconds to publish a shard, and to copy it while nobody else touches memory: by which, median and least."""
    torch.set_num_threads(1)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = f"{host}:{port + 1}"
    # What one rank tells the other goes past the publisher: it is measured.
    installed = torch.distributed.TCPStore(host, port + 3, 2, rank == 0, timeout=timedelta(seconds=60))
    shape, names = (125, 1000), [f"t{i}" for i in range(200)]
    weights = {name: torch.ones(shape, dtype=torch.bfloat16) for name in names}
    if rank == 1:
        subscriber = cm.sync.Subscriber(address, weights, rank=0, size=1)
        while subscriber.version != turns:
            if subscriber.poll(30):
                version = subscriber.install()
                installed.set(f"installed {version}", b"1")
        return None
    publisher = cm.sync.Publisher(address, rank=0, size=1)
    publisher.offer(weights)
    one, other = (torch.ones(len(names) * shape[0] * shape[1], dtype=torch.bfloat16) for _ in range(2))
    copies = {"copy_": lambda: other.copy_(one), "memmove": lambda: ctypes.memmove(other.data_ptr(), one.data_ptr(), one.nbytes)}
    taken = {"publish": [], **{name: [] for name in copies}}
    for version in range(1, turns + 1):
        # Both begin with a processor of their own: on a busy machine who has worked for a while is made to wait.
        time.sleep(0.02)
        start = time.perf_counter()
        publisher.publish(version)
        taken["publish"].append(time.perf_counter() - start)
        publisher.wait(version)
        installed.get(f"installed {version}")
        for name, copy in copies.items():
            time.sleep(0.02)
            start = time.perf_counter()
            copy()
            taken[name].append(time.perf_counter() - start)
    return {name: (statistics.median(times[2:]), min(times[2:])) for name, times in taken.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=60)
    args = parser.parse_args()
    job = cm.init()
    calls = overhead(job, args.calls)
    job.close()
    publish = publishing(job.rank, args.turns)
    if job.rank == 0:
        by_itself = alone(args.calls)
        print(f"call, alone  {by_itself:.1f} us beyond the engine")
        for kind, (call, engine, beyond) in calls.items():
            print(f"call, {kind:<6} {call:8.1f} us, of which the engine {engine:8.1f} us: {beyond:5.1f} us beyond it")
        for which, *found in zip(("median", "least"), *publish.values()):
            ours, *copies = found
            beside = ", ".join(f"{name} {1e3 * copy:.2f} ms: {ours / copy:.2f} x" for name, copy in zip(list(publish)[1:], copies))
            print(f"publish, {which:<6} {1e3 * ours:8.2f} ms; {beside}")
        print(json.dumps({"calls_us": calls, "alone_us": by_itself, **publish}), flush=True)


if __name__ == "__main__":
    main()
