"""Weight sync on emulated hosts: a small Llama of 200 tensors, 200 MB of bf16, from FSDP-4 to 2 x TP-2 with fused parameters. Needs root.

    crossmesh launch -n 8 --per-host 2 --emulate 400Mbit -- python3 bench/python/sync.py [--nic 400Mbit] [--versions 5]

Trainers are ranks 0-3 on the first two hosts, servers ranks 4-7 on the others. A version's time goes from the barrier before `publish` to
the last server's `install`, and every element of the first and the last version is compared. In the same run: every tensor is gathered on
rank 0 and broadcast by torch gloo, a broadcast beside the next gather; and the bytes that vLLM's m2n rule would move, in which fused
tensors go whole to every worker. Rank 0 prints a table and a line of JSON.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist

import crossmesh as cm

CONFIG = dict(
    model_type="llama", hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=22,
    vocab_size=60000, tie_word_embeddings=True, torch_dtype="bfloat16",
)
TRAINERS = SERVERS = 4
FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def values(index, version, shape):
    """What a tensor is in a version: bits that differ everywhere."""
    count = int(torch.Size(shape).numel())
    return (torch.arange(count, dtype=torch.int32) * 40503 + 7919 * version + 31 * index).to(torch.int16).view(shape)


def cut(layout, rank, tensor):
    (box,) = layout.boxes(rank)
    return tensor[tuple(slice(a, b) for a, b in box)]


class Trainer:
    def __init__(self, address, rank, shapes):
        mesh = cm.Mesh("T", fsdp=TRAINERS, ranks=range(TRAINERS))
        self.rank, self.shapes = rank, shapes
        self.layouts = {n: cm.Layout("bf16", s, mesh, ["fsdp"] + [None] * (len(s) - 1)) for n, s in shapes.items()}
        self.shards = {n: torch.empty(lay.shard_shape(rank), dtype=torch.bfloat16) for n, lay in self.layouts.items()}
        self.publisher = cm.sync.Publisher(address, rank=rank, size=TRAINERS)
        self.publisher.offer({n: (self.shards[n], self.layouts[n]) for n in shapes})
        self.bytes = sum(shard.nbytes for shard in self.shards.values())

    def prepare(self, version):
        for index, (name, shape) in enumerate(self.shapes.items()):
            self.shards[name].view(torch.int16).copy_(cut(self.layouts[name], self.rank, values(index, version, shape)))

    def move(self, version):
        self.publisher.publish(version)
        self.publisher.wait(version, 120)
        return self.publisher.timings()


class Server:
    def __init__(self, address, rank, shapes):
        self.rank, self.shapes = rank, shapes
        first = rank - rank % 2
        self.slots = cm.maps.vllm(CONFIG, tp=2, rank=rank, ranks=range(first, first + 2))
        self.params = {}
        for slot in self.slots.values():
            part = slot.layout.shard_shape(rank)
            rows = slot.index[0].stop if slot.index else part[0]
            before = self.params.get(slot.param, (0,))[0]
            self.params[slot.param] = (max(rows, before), *part[1:])
        self.params = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in self.params.items()}
        self.subscriber = cm.sync.Subscriber(address, self.params, self.slots, rank=rank, size=SERVERS)

    def prepare(self, version):
        pass

    def move(self, version):
        while not self.subscriber.poll(120):
            raise SystemExit("no version came")
        assert self.subscriber.install() == version
        return self.subscriber.timings()

    def wrong(self, version):
        found = 0
        for index, (name, shape) in enumerate(self.shapes.items()):
            slot = self.slots[name]
            expected = cut(slot.layout, self.rank, values(index, version, shape))
            found += int((self.params[slot.param][slot.index].view(torch.int16) != expected).sum())
        return found


def gathered(work):
    """All ranks' spans as one: on one machine there is one clock."""
    dist.barrier()
    start = time.monotonic()
    said = work()
    spans = [None] * dist.get_world_size()
    dist.all_gather_object(spans, (start, time.monotonic(), said))
    return max(end for _, end, _ in spans) - min(start for start, _, _ in spans), [said for _, _, said in spans]


def gather_and_broadcast(rank, member, shapes, trainers, receivers):
    """As trainers do that know only whole tensors."""
    pending = []
    for name, shape in shapes.items():
        whole = torch.empty(shape, dtype=torch.bfloat16) if rank == 0 or rank >= TRAINERS else None
        if rank < TRAINERS:
            parts = list(whole.chunk(TRAINERS)) if rank == 0 else None
            dist.gather(member.shards[name], parts, dst=0, group=trainers)
        if whole is not None:
            pending.append((dist.broadcast(whole, 0, group=receivers, async_op=True), whole))
    for work, _ in pending:
        work.wait()


def m2n_bytes(shapes):
    """What enters all workers: fused tensors whole, others by slices; norms whole."""
    total = 0
    for name, shape in shapes.items():
        size = 2 * int(torch.Size(shape).numel())
        whole = len(shape) == 1 or name.split(".")[-2] in FUSED
        total += SERVERS * (size if whole else size // 2)
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nic", default="400Mbit", help="what the hosts have, for the bound")
    parser.add_argument("--versions", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "nic")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainers, receivers = dist.new_group(range(TRAINERS)), dist.new_group([0, *range(TRAINERS, TRAINERS + SERVERS)])
    model = cm.models.from_config(CONFIG)
    pairs = model.pairs("fsdp 4", "dp 2, tp 2")
    shapes = {name: tuple(src.shape) for name, src, _ in pairs}
    plan = cm.models.model_plan(model, "fsdp 4", "dp 2, tp 2", devices_per_host=2, nic=args.nic)
    address = f"{os.environ['MASTER_ADDR']}:7077"
    member = Trainer(address, rank, shapes) if rank < TRAINERS else Server(address, rank - TRAINERS, shapes)
    times, stages = [], []
    for version in range(1, args.versions + 1):
        member.prepare(version)
        seconds, said = gathered(lambda: member.move(version))
        times.append(seconds)
        stages.append(said)
        if version in (1, args.versions) and rank >= TRAINERS:
            assert member.wrong(version) == 0, f"version {version} is wrong on rank {rank}"
    theirs = [gathered(lambda: gather_and_broadcast(rank, member, shapes, trainers, receivers))[0] for _ in range(2)]
    if rank == 0:
        show(plan, times, stages, min(theirs), shapes)
    dist.barrier()
    (member.publisher if rank < TRAINERS else member.subscriber).close()
    os._exit(0)  # gloo's own teardown may hang when peers leave first


def show(plan, times, stages, theirs, shapes):
    bound, steady = plan.lower_bound_s, statistics.median(times[1:])
    total = sum(2 * int(torch.Size(shape).numel()) for shape in shapes.values())
    into_workers = sum(s.get("bytes_received", 0) for s in stages[-1][TRAINERS:])
    print(f"{len(shapes)} tensors, {total} B; bound {bound:.3f} s; first version {times[0]:.3f} s with its plan")
    print(f"crossmesh   {steady:7.3f} s  {steady / bound:5.3f} x the bound   (least {min(times[1:]):.3f}, most {max(times[1:]):.3f})")
    print(f"torch gloo  {theirs:7.3f} s  {theirs / bound:5.3f} x the bound   {theirs / steady:.2f} x crossmesh")
    print(f"bytes into workers: {into_workers} here, {m2n_bytes(shapes)} by m2n's rule ({m2n_bytes(shapes) / into_workers:.2f} x)")
    keys = ("plan_s", "snapshot_s", "digest_s", "wire_s", "round_s", "check_s", "install_s")
    most = {key: round(max((s[key] for s in stages[-1] if key in s), default=0.0), 4) for key in keys}
    print(f"longest stages of the last version: {most}")
    print(json.dumps({"bound_s": bound, "times_s": times, "gloo_s": theirs, "stages": most, "m2n_bytes": m2n_bytes(shapes)}), flush=True)


if __name__ == "__main__":
    main()
