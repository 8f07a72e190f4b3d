"""Run by torchrun, 8 ranks: random plans by our engine and by torch's own operations, against what torch cuts itself."""

import os
import random
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

import crossmesh as cm

RANKS = 8
HOSTS = cm.Cluster(hosts=4, devices=2, nic="1Gbit")
PLANS = int(os.environ.get("CROSSMESH_SWEEP", "50"))
PUT_TOGETHER = 3  # plans whose sources torch puts together itself
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float64]


class Side:
    """A random layout: a mesh of some ranks, torch's placements on it, and ours made of them."""

    def __init__(self, rng, name, dtype, shape, in_order):
        self.sizes = rng.choice([(2,), (4,), (2, 2), (3,), (2, 3), (8,), (2, 4), (2, 2, 2)])
        total = torch.Size(self.sizes).numel()
        self.ranks, self.shape = rng.sample(range(RANKS), total), shape
        if in_order:
            self.ranks.sort()
        can = [Replicate(), *[Shard(dim) for dim in range(len(shape))] * 2]
        if name.startswith("A"):
            can.append(Partial())
        self.placements = [rng.choice(can) for _ in self.sizes]
        axes = {f"{name.lower()}{i}": size for i, size in enumerate(self.sizes)}
        self.layout = cm.torch.layout_of(dtype, shape, self.placements, axes, name, self.ranks)

    def cut(self, rank, value):
        """A rank's part, cut by torch; none where there is nothing."""
        if rank not in self.ranks:
            return None
        at, coord = self.ranks.index(rank), []
        for size in reversed(self.sizes):
            coord.insert(0, at % size)
            at //= size
        local, offset = _compute_local_shape_and_global_offset(self.shape, self.sizes, coord, self.placements)
        part = value[tuple(slice(o, o + n) for o, n in zip(offset, local))]
        return part.clone() if part.numel() else None


def problem(number):
    """Two tensors; whole numbers, so that sums are exact."""
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    sides, parts = {}, {}
    for name in ("w", "b"):
        shape, dtype = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3))), rng.choice(DTYPES)
        # torch's own groups have their ranks in order, whatever order a mesh has: what it puts together is right for such meshes only.
        in_order = number < PUT_TOGETHER
        sides[name] = Side(rng, "A" + name, dtype, shape, in_order), Side(rng, "B" + name, dtype, shape, in_order)
        count = sides[name][0].layout.num_parts
        parts[name] = torch.randint(-9, 9, (count, *shape), generator=generator).to(dtype)
    plan = cm.plan({name: (src.layout, dst.layout) for name, (src, dst) in sides.items()}, cluster=HOSTS)
    return plan, sides, parts


def full_by_torch(side, mine, dtype):
    """The whole tensor, put together by torch; every rank makes the mesh."""
    mesh = DeviceMesh("cpu", torch.tensor(side.ranks).reshape(side.sizes))
    if dist.get_rank() not in side.ranks:
        return None
    empty = [0 if dim == 0 else n for dim, n in enumerate(side.shape)]
    local = mine if mine is not None else torch.empty(empty, dtype=dtype)
    stride = torch.empty(side.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, side.placements, shape=side.shape, stride=stride, run_check=False).full_tensor()


def main():
    dist.init_process_group("gloo")
    rank, job, wrong = dist.get_rank(), cm.init(), []
    for number in range(PLANS):
        plan, sides, parts = problem(number)
        mine = {}
        for name, (src, _) in sides.items():
            part = src.cut(rank, parts[name][src.layout.part(rank)]) if rank in src.ranks else None
            if part is not None:
                mine[name] = part
        learns = {name: t.requires_grad_() if t.is_floating_point() and number % 2 else t for name, t in mine.items()}
        ways = {"engine": job.run(plan, learns), "torch": cm.torch.reshard(plan, {n: t.detach() for n, t in mine.items()})}
        # The tensors are small: messages of several pieces are those of small pieces.
        whole_piece, cm.torch.PIECE_BYTES = cm.torch.PIECE_BYTES, 64
        ways["torch, in pieces"] = cm.torch.reshard(plan, {n: t.detach() for n, t in mine.items()})
        cm.torch.PIECE_BYTES = whole_piece
        given = cm.torch.empty(plan, rank)
        job.run(plan, mine, given, timeout_s=20)
        ways["into torch's memory"] = given
        for name, (src, dst) in sides.items():
            full = parts[name].sum(0, dtype=parts[name].dtype)
            if number < PUT_TOGETHER:
                theirs = full_by_torch(src, mine.get(name), full.dtype)
                if theirs is not None and not torch.equal(theirs.detach(), full):
                    wrong.append(f"plan {number}: torch puts {name} together otherwise")
            wanted = dst.cut(rank, full)
            for way, out in ways.items():
                found = torch.from_dlpack(out[name]) if name in out else None
                if (wanted is None) != (found is None) or (wanted is not None and not torch.equal(wanted, found)):
                    wrong.append(f"plan {number}, rank {rank}, {name}, by {way}: {src.layout} -> {dst.layout}")
    job.close()
    dist.destroy_process_group()
    print(f"rank {rank}: {PLANS} plans, {len(wrong)} wrong", *wrong[:3], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
