"""One rank of a sweep of collectives with torch.distributed (gloo), timed as `crossmesh bench collective` times ours.

    crossmesh launch -n 4 -- python3 bench/peers/gloo_collective.py all-reduce 1KiB 64MiB 4 [ROUNDS]

From the first size to the last, each times the factor. A round is as many calls as take about 20 ms, after two that
are not counted; its time is the slowest rank's, by call. Elements are f32, and results are looked at. Rank 0 prints a
JSON line for every size.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}
ROUND_SECONDS = 0.02


def parse(text):
    unit = next(u for u in UNITS if text.endswith(u))
    return int(text.removesuffix(unit)) * UNITS[unit]


class Collective:
    """The call, and what every element of its result is."""

    def __init__(self, name, count, rank, ranks):
        part = max(count // ranks, 1)
        whole = torch.full((part * ranks if name != "broadcast" else count,), float(rank + 1))
        total = ranks * (ranks + 1) / 2
        self.source, self.result, self.expected = whole, whole, total
        if name == "all-reduce":
            # In place; filled before every call that is looked at.
            self.call = lambda: dist.all_reduce(self.result)
        elif name == "broadcast":
            self.call, self.expected = lambda: dist.broadcast(self.result, 0), 1.0
        elif name == "reduce":
            self.call = lambda: dist.reduce(self.result, 0)
            self.expected = total if rank == 0 else None
        elif name == "all-gather":
            self.source = torch.full((part,), float(rank + 1))
            self.result = torch.zeros(part * ranks)
            self.call, self.expected = lambda: dist.all_gather_into_tensor(self.result, self.source), None
        elif name == "reduce-scatter":
            self.result = torch.zeros(part)
            self.call = lambda: dist.reduce_scatter_tensor(self.result, self.source)
        elif name == "all-to-all":
            self.result = torch.zeros(part * ranks)
            self.call, self.expected = lambda: dist.all_to_all_single(self.result, self.source), None
        else:
            sys.exit(f"no such collective: {name}")

    def check(self):
        self.call()
        if self.expected is not None:
            found = {float(self.result[0]), float(self.result[-1])}
            assert found == {self.expected}, f"{found} is not {self.expected}"


def slowest(seconds):
    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor[0])


def timed(call, calls):
    dist.barrier()
    start = time.monotonic()
    for _ in range(calls):
        call()
    return slowest((time.monotonic() - start) / calls)


def main():
    name, first, last, factor = sys.argv[1], parse(sys.argv[2]), parse(sys.argv[3]), int(sys.argv[4])
    rounds = int(sys.argv[5]) if len(sys.argv) > 5 else 7
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = first
    while size <= last:
        collective = Collective(name, max(size // 4, 1), rank, ranks)
        collective.check()
        estimate = timed(collective.call, 2)
        calls = max(1, min(1000, int(ROUND_SECONDS / max(estimate, 1e-7))))
        seconds = [timed(collective.call, calls) for _ in range(rounds)]
        if rank == 0:
            line = {"collective": name, "bytes": size, "measured_s": seconds}
            print(json.dumps({**line, "median_s": statistics.median(seconds)}), flush=True)
        size *= factor
    dist.barrier()
    # Gloo's own teardown may hang when peers leave first; the numbers are out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
