"""Run by torchrun, 8 ranks: modules under FSDP2 and tensor parallelism, whose shards are what our layouts say of torch's whole tensors."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from ranks import leave

import crossmesh as cm

MODULES = 20
# FSDP over tensor parallelism, and over replicas of it (HSDP).
MESHES = [{"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}, {"replicate": 2, "dp": 2, "tp": 2}, {"dp": 8, "tp": 1}]


class Block(nn.Module):
    def __init__(self, rng):
        super().__init__()
        words, hidden = (rng.randint(5, 30) for _ in range(2))
        # Columns for every rank of tp: where one has none, FSDP leaves it a shard of shape (0, 0), which torch cannot put together.
        inner = rng.randint(10, 30)
        self.embed = nn.Embedding(words, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner, bias=rng.random() < 0.5)
        self.down = nn.Linear(inner, hidden, bias=rng.random() < 0.5)
        self.head = nn.Linear(hidden, words, bias=False)


def sharded(number, meshes):
    """A module as FSDP2 and tensor parallelism have it, and its weights as they were."""
    rng = random.Random(number)
    torch.manual_seed(number)
    module = Block(rng)
    if rng.random() < 0.3:
        module.to(torch.bfloat16)
    whole = {name: value.detach().clone() for name, value in module.named_parameters()}
    mesh = meshes[number % len(meshes)]
    # FSDP cuts rows. Uneven columns of its own it refuses; what tensor parallelism leaves may be as uneven as it likes.
    parallelize_module(module, mesh["tp"], {"embed": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel()})
    data = mesh["replicate", "dp"] if "replicate" in mesh.mesh_dim_names else mesh["dp"]
    for part in (module.up, module.down):
        fully_shard(part, mesh=data)
    fully_shard(module, mesh=data)
    return module, whole


def wrong_with(name, tensor, whole):
    """What of a DTensor our layout says otherwise; nothing, if all is well."""
    rank = dist.get_rank()
    layout, full, local = cm.torch.layout(tensor, "T"), tensor.full_tensor(), tensor.to_local()
    boxes = layout.boxes(rank)
    # All ranks put it together, also those that have found something.
    again = cm.torch.dtensor(layout, local if boxes else None, tensor.device_mesh)
    put_together = again.full_tensor()
    if not torch.equal(full, whole):
        return f"torch's own full_tensor of {name} is not the weight"
    ours = full[tuple(slice(a, b) for a, b in boxes[0])] if boxes else None
    if (ours is None) != (local.numel() == 0) or (ours is not None and not torch.equal(ours, local)):
        return f"{name}: {tensor.placements} of {tuple(tensor.shape)} is {layout}, whose boxes here are {boxes}, not {tuple(local.shape)}"
    if cm.torch.placements(layout) != tuple(tensor.placements):
        return f"{name}: {layout} came from {tensor.placements} and went back to {cm.torch.placements(layout)}"
    if cm.torch.layout(again, "T") != layout or not torch.equal(put_together, whole):
        return f"{name}: {layout} as a DTensor is another tensor"
    return None


def wrong_with_two_meanings(mesh):
    """9 rows over tp 2 and then dp 4: FSDP leaves the last row with the last rank, as ``full_tensor`` has it; ``distribute_tensor`` gives it to the one
    before, in the same placements. Such a DTensor is not taken for FSDP's.
    """
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    tensor = distribute_tensor(torch.arange(9.0), mesh, placements, src_data_rank=None)
    try:
        cm.torch.layout(tensor, "T")
    except cm.LayoutError as error:
        refused = f"{list(tensor.to_local().shape)}, not" in str(error) and "hint" in str(error)
    else:
        refused = False
    return [] if refused == (dist.get_rank() in (6, 7)) else ["a shard that is elsewhere than FSDP has it was taken for FSDP's"]


def main():
    dist.init_process_group("gloo")
    tensors, strided, uneven = 0, 0, 0
    meshes = [init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)) for axes in MESHES]
    wrong = wrong_with_two_meanings(meshes[0])
    for number in range(MODULES):
        module, whole = sharded(number, meshes)
        for name, tensor in module.state_dict().items():
            assert isinstance(tensor, DTensor), name
            tensors, strided = tensors + 1, strided + any(type(p).__name__ == "_StridedShard" for p in tensor.placements)
            uneven += any(tensor.shape[p.dim] % tensor.device_mesh.size() for p in tensor.placements if hasattr(p, "dim"))
            found = wrong_with(name, tensor, whole[name])
            wrong += [f"module {number}: {found}"] if found else []
    said = f"rank {dist.get_rank()}: {len(wrong)} wrong of {tensors} tensors, {strided} strided, {uneven} uneven"
    print(said, *wrong[:3], sep="\n")
    leave(failed=wrong)


if __name__ == "__main__":
    main()
