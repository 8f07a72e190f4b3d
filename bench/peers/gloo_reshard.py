"""One rank of a reshard with torch.distributed (gloo), as a framework does it today.

    crossmesh launch -n N --per-host LIST --emulate RATE -- python3 gloo_reshard.py BOXES METHOD REPEAT

METHOD is `sendrecv`: every receiver gets every box from one holder, all posted at once; or `broadcast`: one broadcast
per box, from its holder to its receivers. BOXES has them, as `crossmesh plan --strategy sendrecv` cuts and places them.
Boxes lie packed in memory on both sides, so packing and unpacking cost gloo nothing here. Rank 0 prints a JSON line.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist


def read_boxes(path):
    """A line a box: its bytes, its holder, then its receivers."""
    with open(path) as file:
        lines = [[int(word) for word in line.split()] for line in file]
    return [{"bytes": line[0], "src": line[1], "dsts": line[2:]} for line in lines]


def sendrecv(rank, boxes, buffers, _groups):
    work = []
    for tag, box in enumerate(boxes):
        if rank == box["src"]:
            work += [dist.isend(buffers[tag], dst, tag=tag) for dst in box["dsts"]]
        elif rank in box["dsts"]:
            work.append(dist.irecv(buffers[tag], box["src"], tag=tag))
    for one in work:
        one.wait()


def broadcast(rank, boxes, buffers, groups):
    work = []
    for tag, box in enumerate(boxes):
        if tag in buffers:
            work.append(dist.broadcast(buffers[tag], box["src"], group=groups[tag], async_op=True))
    for one in work:
        one.wait()


def main():
    path, method, repeat = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    boxes = read_boxes(path)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    buffers, groups, by_members = {}, {}, {}
    for tag, box in enumerate(boxes):
        members = tuple(sorted({box["src"], *box["dsts"]}))
        if method == "broadcast":
            # Every rank has to take part in making a group, in the same order.
            if members not in by_members:
                by_members[members] = dist.new_group(members)
            groups[tag] = by_members[members]
        if rank in members:
            buffers[tag] = torch.empty(box["bytes"], dtype=torch.uint8)
    move = {"sendrecv": sendrecv, "broadcast": broadcast}[method]
    seconds = []
    for turn in range(repeat):
        for tag, buffer in buffers.items():
            buffer.fill_((tag * 7 + turn) % 251 if rank == boxes[tag]["src"] else 255)
        dist.barrier()
        start = time.monotonic()
        move(rank, boxes, buffers, groups)
        end = time.monotonic()
        for tag, buffer in buffers.items():
            assert int(buffer[0]) == int(buffer[-1]) == (tag * 7 + turn) % 251, f"box {tag} on rank {rank}"
        # One machine, one clock.
        spans = [None] * dist.get_world_size()
        dist.all_gather_object(spans, (start, end))
        seconds.append(max(e for _, e in spans) - min(s for s, _ in spans))
    if rank == 0:
        print(json.dumps({"method": method, "measured_s": seconds}), flush=True)
    dist.barrier()
    # Gloo's own teardown may hang when peers leave first; the numbers are out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
