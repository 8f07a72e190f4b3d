"""Ranks that send a message there and back, or sum one up, with torch.distributed (gloo), as crates/comm/examples/ping.rs does.

    crossmesh launch -n 2 -- python3 bench/peers/gloo_ping.py BYTES ROUNDS [all-reduce]

Every rank prints a JSON line: the median time of a round (of half a round, for there and back), and the processor time of one.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

WARM_UP = 20


def there_and_back(rank, data):
    if rank == 0:
        dist.send(data, 1)
        dist.recv(data, 1)
    else:
        dist.recv(data, 0)
        dist.send(data, 0)


def main():
    size, rounds, sums = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["all-reduce"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = torch.zeros(size // 4)
    one = (lambda: dist.all_reduce(data)) if sums else (lambda: there_and_back(rank, data))
    for _ in range(min(WARM_UP, rounds)):
        one()
    seconds, processor = [], time.process_time()
    for _ in range(rounds):
        start = time.monotonic()
        one()
        seconds.append((time.monotonic() - start) / (1 if sums else 2))
    processor = (time.process_time() - processor) / rounds
    # What everybody has as 0 stays 0; what a rank alone has as 1 arrives once.
    data[-1] = 1.0 if rank == 0 else 0.0
    one()
    assert float(data.sum()) == 1.0, "what came back is not what was sent"
    line = {"bytes": size, "median_s": statistics.median(seconds), "least_s": min(seconds), "processor_s": processor}
    print(json.dumps(line), flush=True)
    dist.barrier()
    # Gloo's own teardown may hang when peers leave first; the numbers are out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
