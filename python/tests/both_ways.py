"""Run by torchrun, 8 ranks: random plans by our engine and by torch's own operations, against what torch puts together and cuts itself."""

import functools
import os
import random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from ranks import leave

import crossmesh as cm

RANKS = 8
HOSTS = cm.Cluster(hosts=4, devices=2, nic="1Gbit")
PLANS = max(50, int(os.environ.get("CROSSMESH_SWEEP", "50")))
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float64]
SIZES = [(2,), (4,), (2, 2), (3,), (2, 3), (8,), (2, 4), (2, 2, 2)]
GAP = 77  # what lies between the elements of a tensor with gaps


@functools.cache
def mesh_of(sizes, ranks):
    """torch's mesh; every rank makes it."""
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(sizes))


class Side:
    """A random layout: a mesh of some ranks, torch's placements on it, and ours made of them.

    torch's own groups have their ranks in order, whatever order a mesh has: what it puts together and cuts is right for meshes in order only. Of
    others (``in_order`` is False) the test cuts, by torch's index map.
    """

    def __init__(self, rng, name, dtype, shape, in_order):
        self.sizes = rng.choice(SIZES)
        total, self.shape, self.in_order = torch.Size(self.sizes).numel(), shape, in_order
        first = rng.choice([0, RANKS - total])
        self.ranks = list(range(first, first + total)) if in_order else rng.sample(range(RANKS), total)
        can = [Replicate(), *[Shard(dim) for dim in range(len(shape))] * 2]
        if name.startswith("A"):
            can.append(Partial())
        self.placements = [rng.choice(can) for _ in self.sizes]
        axes = {f"{name.lower()}{i}": size for i, size in enumerate(self.sizes)}
        self.layout = cm.torch.layout_of(dtype, shape, self.placements, axes, name, self.ranks)
        self.whole = [Replicate() if p.is_partial() else p for p in self.placements]
        self.mesh = mesh_of(self.sizes, tuple(self.ranks)) if in_order else None

    def cut(self, rank, value):
        """A rank's part, cut by torch; none where there is nothing."""
        if rank not in self.ranks:
            return None
        if self.in_order:
            part = distribute_tensor(value, self.mesh, self.whole, src_data_rank=None).to_local()
        else:
            part = self._cut(self.ranks.index(rank), value)
        return part.clone() if part.numel() else None

    def _cut(self, at, value):
        coord = []
        for size in reversed(self.sizes):
            coord.insert(0, at % size)
            at //= size
        local, offset = _compute_local_shape_and_global_offset(self.shape, self.sizes, coord, self.placements)
        return value[tuple(slice(o, o + n) for o, n in zip(offset, local))]

    def full(self, rank, mine, value):
        """The whole tensor on every rank: put together by torch where it can, else added up here."""
        if not self.in_order:
            return value.sum(0, dtype=value.dtype)
        full = torch.empty(self.shape, dtype=value.dtype)
        if rank in self.ranks:
            local = mine if mine is not None else distribute_tensor(full, self.mesh, self.whole, src_data_rank=None).to_local()
            stride = full.stride()
            full = DTensor.from_local(local, self.mesh, self.placements, shape=full.shape, stride=stride, run_check=False).full_tensor()
        dist.broadcast(full, self.ranks[0])
        return full


class Fused:
    """Experts of fused parts, ``[E, F+F, H]``, on two axes: experts over one, each part over the other on its own, along any dim but the first."""

    def __init__(self, rng, name, dtype, shape, dim, parts):
        self.sizes, self.shape, self.dim, self.parts = rng.choice([(1, 2), (2, 2), (1, 3), (2, 4)]), shape, dim, parts
        total = torch.Size(self.sizes).numel()
        self.ranks = sorted(rng.sample(range(RANKS), total))
        terms = ["ep" if at == 0 else None for at in range(len(shape))]
        terms[dim] = "tp of " + "+".join(map(str, parts))
        self.layout = cm.Layout(dtype, shape, cm.Mesh(name, ep=self.sizes[0], tp=self.sizes[1], ranks=self.ranks), terms)

    def cut(self, rank, value):
        """Each part chunked by torch, and the chunks put beside each other."""
        if rank not in self.ranks:
            return None
        expert, at = divmod(self.ranks.index(rank), self.sizes[1])
        mine = chunk(value, self.sizes[0], expert, 0)
        part = torch.cat([chunk(p, self.sizes[1], at, self.dim) for p in mine.split(self.parts, self.dim)], self.dim)
        return part if part.numel() else None

    def full(self, rank, mine, value):
        return value[0]


def chunk(value, count, at, dim):
    chunks = value.chunk(count, dim)
    return chunks[at] if at < len(chunks) else value.narrow(dim, 0, 0)


def problem(number):
    """Three tensors, one of them fused on one side; whole numbers, so that sums are exact."""
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    sides, parts, in_order = {}, {}, number % 5 != 4
    for name in ("w", "b", "experts"):
        shape, dtype = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3))), rng.choice(DTYPES)
        if name == "experts":
            dim, fused = rng.randint(1, 2), [rng.randint(1, 5) for _ in range(rng.randint(2, 3))]
            shape = [rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 5)]
            shape[dim] = sum(fused)
            other = Side(rng, "Bx" if number % 2 else "Ax", dtype, shape, in_order)
            fused = Fused(rng, "F", dtype, shape, dim, fused)
            sides[name] = (fused, other) if number % 2 else (other, fused)
        else:
            sides[name] = Side(rng, "A" + name, dtype, shape, in_order), Side(rng, "B" + name, dtype, shape, in_order)
        count = sides[name][0].layout.num_parts
        parts[name] = torch.randint(-9, 9, (count, *shape), generator=generator).to(dtype)
    plan = cm.plan({name: (src.layout, dst.layout) for name, (src, dst) in sides.items()}, cluster=HOSTS)
    return plan, sides, parts


def spread(tensor):
    """The same values with gaps between them, dims the other way round in memory."""
    room = torch.full([2 * n + 1 for n in reversed(tensor.shape)], GAP, dtype=tensor.dtype)
    view = room[tuple(slice(1, None, 2) for _ in tensor.shape)].permute(*reversed(range(tensor.dim())))
    view.copy_(tensor.detach())
    return view


def gaps_are_as_they_were(view):
    room = view._base.clone()
    room.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(GAP)
    return bool((room == GAP).all())


def ways(job, plan, rank, number, mine):
    """The same plan by everybody, into memory of everybody's; by name of the way."""
    learns = {name: t.requires_grad_() if t.is_floating_point() and number % 2 else t for name, t in mine.items()}
    apart = {name: spread(t) for name, t in mine.items()}
    new = lambda: {name: torch.zeros_like(t) for name, t in cm.torch.empty(plan, rank).items()}  # noqa: E731
    found = {"engine": job.run(plan, learns), "torch": cm.torch.reshard(plan, learns)}
    # The tensors are small: messages of several pieces are those of small pieces.
    whole_piece, cm.torch.PIECE_BYTES = cm.torch.PIECE_BYTES, 64
    found["torch, in pieces"] = cm.torch.reshard(plan, mine)
    found["torch, with gaps"] = cm.torch.reshard(plan, apart, {name: spread(t) for name, t in new().items()})
    cm.torch.PIECE_BYTES = whole_piece
    found["engine, with gaps"] = {name: spread(t) for name, t in new().items()}
    job.run(plan, apart, found["engine, with gaps"], timeout_s=20)
    found["into torch's memory"] = new()
    job.run(plan, mine, found["into torch's memory"], timeout_s=20)
    return found


def main():
    dist.init_process_group("gloo")
    rank, job, wrong, put_together = dist.get_rank(), cm.init(), [], 0
    for number in range(PLANS):
        plan, sides, parts = problem(number)
        mine = {}
        for name, (src, _) in sides.items():
            part = src.cut(rank, parts[name][src.layout.part(rank)]) if rank in src.ranks else None
            if part is not None:
                mine[name] = part
        found = ways(job, plan, rank, number, mine)
        for name, (src, dst) in sides.items():
            full = src.full(rank, None if name not in mine else mine[name].detach(), parts[name])
            put_together += getattr(src, "in_order", False)
            if not torch.equal(full, parts[name].sum(0, dtype=full.dtype)):
                wrong.append(f"plan {number}: torch puts {name} together otherwise")
            wanted = dst.cut(rank, full)
            for way, out in found.items():
                got = torch.from_dlpack(out[name]) if name in out else None
                if (wanted is None) != (got is None) or (wanted is not None and not torch.equal(wanted, got)):
                    wrong.append(f"plan {number}, rank {rank}, {name}, by {way}: {src.layout} -> {dst.layout}")
                elif got is not None and "gaps" in way and not gaps_are_as_they_were(out[name]):
                    wrong.append(f"plan {number}, rank {rank}, {name}, by {way}: wrote beside its elements")
    job.close()
    print(f"rank {rank}: {PLANS} plans, {len(wrong)} wrong; torch put {put_together} tensors together", *wrong[:3], sep="\n")
    leave(failed=wrong)


if __name__ == "__main__":
    main()
