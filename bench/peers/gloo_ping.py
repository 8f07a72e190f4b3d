"""One of two ranks that send a message there and back with torch.distributed (gloo), as crates/comm/examples/ping.rs does.

    crossmesh launch -n 2 -- python3 bench/peers/gloo_ping.py BYTES ROUNDS

Rank 0 prints a JSON line: the time one way, by round.
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
    size, rounds = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = torch.ones(size // 4, dtype=torch.int32)
    for _ in range(min(WARM_UP, rounds)):
        there_and_back(rank, data)
    seconds = []
    for _ in range(rounds):
        start = time.monotonic()
        there_and_back(rank, data)
        seconds.append((time.monotonic() - start) / 2)
    assert bool((data == 1).all()), "what came back is not what was sent"
    if rank == 0:
        line = {"bytes": size, "median_s": statistics.median(seconds), "least_s": min(seconds)}
        print(json.dumps(line), flush=True)
    dist.barrier()
    # Gloo's own teardown may hang when peers leave first; the numbers are out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
