"""A torch module under FSDP2 on 4 ranks trains a step, and its weights go to 2 x 2 tensor-parallel ranks of the same torch job, by torch's own operations.

torchrun --nproc-per-node 8 examples/python/fsdp2_to_tp.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import crossmesh as cm

TRAINERS, HIDDEN, INNER = 4, 32, 50


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = torch.nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down = torch.nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(Mlp(), Mlp())
shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
trainers = DeviceMesh("cpu", list(range(TRAINERS)), mesh_dim_names=("fsdp",))  # every rank of the job makes it

# What a server wants: gate and up, each by its rows; down by its columns; on two replicas of two.
servers = cm.Mesh("S", dp=2, tp=2, ranks=range(4, 8))
cuts = {"gate_up": (f"tp of {INNER}+{INNER}", None), "down": (None, "tp")}
pairs = {}
for name, shape in shapes.items():
    src = cm.torch.layout_of(torch.float32, shape, [Shard(0)], {"fsdp": TRAINERS}, "T", range(TRAINERS))
    pairs[name] = (src, cm.Layout("f32", shape, servers, cuts[name.split(".")[1]]))
plan = cm.plan(pairs)

mine = {}
if rank < TRAINERS:
    for block in model:
        fully_shard(block, mesh=trainers)
    fully_shard(model, mesh=trainers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, HIDDEN) * (rank + 1)).square().mean().backward()
    optimizer.step()
    mine = {name: value.to_local().detach() for name, value in model.named_parameters()}
out = cm.torch.reshard(plan, mine)

# The oracle is torch's: what the trainers put together, cut here.
for name, shape in shapes.items():
    whole = torch.empty(shape)
    if rank < TRAINERS:
        whole = dict(model.named_parameters())[name].full_tensor().detach()
    dist.broadcast(whole, src=0)
    if rank >= TRAINERS:
        tp = (rank - TRAINERS) % 2
        wanted = torch.cat([part.chunk(2)[tp] for part in whole.chunk(2)]) if "gate_up" in name else whole.chunk(2, dim=1)[tp]
        assert torch.equal(out[name], wanted), name
print(f"rank {rank}: {len(mine)} shards given, {len(out)} got, bit for bit", flush=True)
dist.barrier()
os._exit(0)  # a process that ends under gloo's threads may be aborted
