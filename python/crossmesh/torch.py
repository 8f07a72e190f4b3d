"""Layouts of torch's DTensors, and plans on torch's own process groups.

``reshard`` runs a plan with the point-to-point operations of a group that the caller has: gloo, NCCL or any other. Nothing else has to
run beside it, so a torch job of any size can use a plan with the transport it trusts.

How it cannot get stuck: every rank posts its operations in the order of its list, none of which waits for itself; it stands still only for
operations that it has posted already, and transfers are listed behind what they wait for. So of all that somebody waits for, the
first in the order of transfers has been posted on both sides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from . import ArrayError, CrossmeshError, JobError, Layout, LayoutError, Plan

_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "i64": torch.int64,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
# How much of a message arrives before it is passed on. At some 45 us an operation, smaller ones would keep Python in the way.
PIECE_BYTES = 1 << 20
_COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def layout(tensor: Any, name: str = "A", *, rank_offset: int = 0) -> Layout:
    """The layout of a DTensor; ``name`` is what its mesh is called.

    FSDP2 over tensor parallelism, whose shards nest the other way round (``_StridedShard``), is told by the order of the axes.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    sizes = tuple(mesh.mesh.shape)
    names = mesh.mesh_dim_names or tuple(f"d{i}" for i in range(len(sizes)))
    ranks = [int(rank) + rank_offset for rank in mesh.mesh.flatten().tolist()]
    return layout_of(tensor.dtype, tensor.shape, placements, dict(zip(names, sizes)), name, ranks)


def layout_of(
    dtype: torch.dtype,
    shape: Any,
    placements: Any,
    axes: Mapping[str, int],
    name: str = "A",
    ranks: Any = None,
) -> Layout:
    """The layout of placements on a mesh with these axes, in the order of its dims."""
    from . import Mesh

    names, sizes = list(axes), list(axes.values())
    orders: list[list[int]] = [[] for _ in shape]
    partial, op = [], "sum"
    for at in reversed(range(len(placements))):
        placement = placements[at]
        kind = type(placement).__name__
        if placement.is_replicate():
            continue
        if placement.is_partial():
            partial.insert(0, names[at])
            op = placement.reduce_op
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise LayoutError(f"placement {at}, {placement}, has no counterpart\nhint: Shard, Replicate and Partial have")
        _nest(orders[placement.dim], at, sizes, placement)
    ops = {str(p.reduce_op) for p in placements if p.is_partial()}
    if len(ops) > 1 or (ops and op not in _COMBINE):
        raise LayoutError(f"Partial({', '.join(sorted(ops))}) has no counterpart\nhint: one of {', '.join(_COMBINE)}")
    dims = [[names[axis] for axis in order] or None for order in orders]
    mesh = Mesh(name, ranks=ranks, **axes)
    return Layout(dtype, list(shape), mesh, dims, partial=partial or None, op=op)


def _nest(order: list[int], axis: int, sizes: list[int], placement: Any) -> None:
    """Puts an axis where it splits: before all that follow it in the mesh, or behind as many parts as its split factor says."""
    factor, at = getattr(placement, "split_factor", 1), 0
    while factor > 1 and at < len(order) and factor % sizes[order[at]] == 0:
        factor //= sizes[order[at]]
        at += 1
    if factor != 1:
        raise LayoutError(f"{placement}: no nesting of the mesh's axes has this split factor")
    order.insert(at, axis)


def empty(plan: Plan, rank: int, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """Tensors for what a rank is to receive, by name."""
    out = {}
    for name, _, dst in plan.tensors:
        if rank in dst.ranks and dst.holds(rank):
            out[name] = torch.empty(dst.shard_shape(rank), dtype=_DTYPES[dst.dtype], device=device)
    return out


def reshard(
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    out: dict[str, torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, torch.Tensor]:
    """Moves this rank's shards as the plan says, over the group's own operations; every rank of the plan calls it.

    ``tensors`` are this rank's shards by name, ``out`` is filled in place (made where it is missing) and returned.
    """
    rank = dist.get_rank(group)
    program = json.loads(plan.for_rank(rank)) if rank < plan.num_ranks else {"ranks": []}
    piece_bytes = _agree(plan, program, group)
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    out = empty(plan, rank, device) if out is None else out
    if program["ranks"]:
        _Run(plan, program, rank, tensors, out, device, group, piece_bytes).run()
    return out


def _agree(plan: Plan, program: dict, group: dist.ProcessGroup | None) -> int | None:
    """Before a byte moves: gloo ends a process whose receive is smaller than what was sent. Returns into which pieces messages are cut.

    They are not where messages match by order and not by tag, as NCCL's, or where somebody's ops wait for the whole of another.
    """
    size = dist.get_world_size(group)
    if size < plan.num_ranks:
        raise JobError(f"the plan is for {plan.num_ranks} ranks, the group has {size}")
    backend = dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    waits = any(_waits_for_all(op, rank["ops"]) for rank in program["ranks"] for op in rank["ops"])
    mine = torch.tensor([plan.fingerprint, waits], dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(all_of_them, mine, group=group)
    found = [int(t[0]) for t in all_of_them]
    differs = next((rank for rank, other in enumerate(found) if other != found[0]), None)
    if differs is not None:
        raise JobError(
            f"rank 0 has plan {found[0]:016x}, rank {differs} has plan {found[differs]:016x}; nothing was moved\n"
            "hint: plan with the same layouts, cluster and options on every rank"
        )
    return None if backend == "nccl" or any(int(t[1]) for t in all_of_them) else PIECE_BYTES


def _waits_for_all(op: dict, ops: list[dict]) -> bool:
    """Whether an op needs more of another than the piece that it is at itself."""
    behind = op.get("follows", [])
    by_piece = op["op"] == "send" and len(behind) == 1 and not ops[behind[0]].get("reduce")
    return bool(op.get("after") or (behind and not by_piece))


class _Run:
    """One rank's program under way.

    What is passed on is passed on piece by piece, in the order of the pieces first and of the list then: a piece that anybody stands
    still for comes before the one that it is wanted for, in the order of all ranks, so somebody can always go on.
    """

    def __init__(self, plan, program, rank, tensors, out, device, group, piece_bytes) -> None:
        self.tensors, self.boxes = program["tensors"], program["boxes"]
        self.mine, self.rank, self.group, self.device = program["ranks"][0], rank, group, device
        self.memory = [self._memory(buffer, plan, tensors, out) for buffer in self.mine["buffers"]]
        self.ops = self.mine["ops"]
        self.piece_bytes = piece_bytes
        # A message's pieces have tags of their own, beyond those of all messages.
        self.tags = 2 * plan.num_transfers + 1
        # By op: what ends each piece, as far as they have been posted; and what its memory is, as one row.
        self.ends: list[list[Any]] = [[] for _ in self.ops]
        self.rows: list[Any] = [None] * len(self.ops)

    def _memory(self, buffer, plan, tensors, out) -> torch.Tensor:
        """A buffer as one row of elements; of bytes, where it is staging."""
        if buffer["role"] == "staging":
            return torch.empty(buffer["bytes"], dtype=torch.uint8, device=self.device)
        source = buffer["role"] == "source"
        tensor = self.tensors[buffer["tensor"]]
        name, given = plan.tensors[buffer["tensor"]][0], tensors if source else out
        what = f"tensor `{name}` of rank {self.rank}, {'source' if source else 'out'}"
        if name not in given:
            raise ArrayError(f"{what}: missing\nhint: give all shards that this rank holds, by name")
        found, wanted = given[name], _DTYPES[tensor["dtype"]]
        if found.dtype != wanted:
            raise ArrayError(f"{what}: dtype {wanted} is expected, {found.dtype} was given")
        if found.numel() * found.element_size() != buffer["bytes"]:
            elements = buffer["bytes"] // found.element_size()
            raise ArrayError(f"{what}: {elements} elements are expected, {found.numel()} were given, of shape {tuple(found.shape)}")
        if not source and not found.is_contiguous():
            raise ArrayError(f"{what}: it is not contiguous\nhint: give a contiguous tensor, or none")
        return found.detach().reshape(-1)

    def _view(self, op, tile_number: int) -> torch.Tensor:
        """The box of an op inside a tile."""
        tile = self.mine["tiles"][tile_number]
        dtype = _DTYPES[self.tensors[op["tensor"]]["dtype"]]
        width, held, box = dtype.itemsize, self.boxes[tile["box"]], self.boxes[op["box"]]
        base = self.memory[tile["buffer"]]
        strides = tile.get("strides")
        if strides is None:
            strides, step = [0] * len(held), width
            for dim in reversed(range(len(held))):
                strides[dim] = step
                step *= held[dim][1] - held[dim][0]
        start = tile["offset"] + sum((b[0] - h[0]) * s for b, h, s in zip(box, held, strides))
        shape = [b[1] - b[0] for b in box]
        if base.dtype != dtype:
            base = base[tile["offset"] % width :].view(dtype) if base.numel() else base.view(dtype)
        return base.as_strided(shape, [s // width for s in strides], base.storage_offset() + start // width)

    def run(self) -> None:
        left = list(range(len(self.ops)))
        while left:
            posted = [op for op in left if self._post(op)]
            if not posted:
                raise CrossmeshError(f"rank {self.rank}: ops {left[:5]} wait for each other")
            left = [op for op in left if len(self.ends[op]) < self._pieces(op)]
        for op in range(len(self.ops)):
            self._end(op)

    def _pieces(self, number: int) -> int:
        """Of a message: by its bytes alone, so that both ends count the same."""
        op = self.ops[number]
        if op["op"] == "copy" or self.piece_bytes is None:
            return 1
        return max(1, -(-op["bytes"] // self.piece_bytes))

    def _post(self, number: int) -> bool:
        """Starts the next piece of an op, of a receive all of them, once what it waits for is over; False where that has not been started."""
        op, piece = self.ops[number], len(self.ends[number])
        behind = op.get("follows", [])
        if any(len(self.ends[other]) < self._pieces(other) for other in op.get("after", [])):
            return False
        if any(len(self.ends[other]) <= piece for other in behind):
            return False
        for other in op.get("after", []):
            self._end(other)
        for other in behind:
            self._end(other, piece + 1)
        if op["op"] == "copy":
            self._copy(op)
            self.ends[number].append(_nothing)
        elif op["op"] == "send":
            self._send(number, op, piece)
        else:
            self._recv(number, op)
        return True

    def _end(self, number: int, count: int | None = None) -> None:
        """Waits for the first pieces of an op, or for all."""
        ends = self.ends[number]
        for piece in range(len(ends) if count is None else count):
            end, ends[piece] = ends[piece], _nothing
            end()

    def _copy(self, op) -> None:
        self._put(op, self._view(op, op["into"]), self._view(op, op["from"]))

    def _cut(self, row: torch.Tensor, number: int, piece: int) -> torch.Tensor:
        if self._pieces(number) == 1:
            return row
        step = self.piece_bytes // row.element_size()
        return row[piece * step : (piece + 1) * step]

    def _tag(self, op, piece: int) -> int:
        return op["tag"] + piece * self.tags

    def _send(self, number: int, op, piece: int) -> None:
        if self.rows[number] is None:
            behind = op.get("follows", [])
            if self.piece_bytes is not None and behind:
                # The same bytes, where they arrive: what they are unpacked into is there when all of them are.
                self.rows[number] = self.rows[behind[0]]
            else:
                self.rows[number] = (self._view(op, op["from"]) if op["bytes"] else self._word()).contiguous().reshape(-1)
        row = self.rows[number]
        data = _plain(self._cut(row, number, piece))
        work = dist.isend(data, group_dst=op["peer"], group=self.group, tag=self._tag(op, piece))

        def wait(kept=data):  # the bytes stay until they have been read
            work.wait()

        self.ends[number].append(wait)

    def _recv(self, number: int, op) -> None:
        into = self._view(op, op["into"]) if op["bytes"] else self._word()
        direct = not op.get("reduce") and into.is_contiguous()
        data = into if direct else torch.empty(into.shape, dtype=into.dtype, device=into.device)
        row, count = data.reshape(-1), self._pieces(number)
        self.rows[number] = row
        for piece in range(count):
            part = _plain(self._cut(row, number, piece))
            work = dist.irecv(part, group_src=op["peer"], group=self.group, tag=self._tag(op, piece))
            self.ends[number].append(work.wait)
        if not direct:
            last = self.ends[number][-1]

            def unpack():
                last()
                self._put(op, into, data)

            self.ends[number][-1] = unpack

    def _put(self, op, into: torch.Tensor, data: torch.Tensor) -> None:
        if op.get("reduce"):
            combine = _COMBINE[self.tensors[op["tensor"]]["partial"]["op"]]
            data = combine(into, data)
        into.copy_(data)

    def _word(self) -> torch.Tensor:
        """A message that carries order alone; not every transport sends nothing."""
        return torch.zeros(1, dtype=torch.uint8, device=self.device)


def _nothing() -> None:
    """It is over."""


def _plain(data: torch.Tensor) -> torch.Tensor:
    """What any transport can carry: 8-bit floats and truth values as bytes."""
    odd = data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool)
    return data.view(torch.uint8) if odd else data
