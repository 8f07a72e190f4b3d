"""Layouts as torch's placements, both ways.

torch says for every axis of a mesh which dim it shards, and goes through the axes in the order of the mesh; we say for every dim which axes split
it, the major one first. Where the two orders differ, torch has ``_StridedShard``: its split factor is into how many parts the axes behind it
in the mesh, but before it in the nesting, have cut the dim already.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from . import ArrayError, Layout, LayoutError, Mesh

REDUCTIONS = ("sum", "max", "min")


def layout(tensor: Any, name: str = "A", *, rank_offset: int = 0) -> Layout:
    """The layout of a DTensor; ``name`` is what its mesh is called.

    FSDP2 over tensor parallelism, whose shards nest the other way round (``_StridedShard``, or a shard order), is told by the order of the axes.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    sizes = tuple(mesh.mesh.shape)
    names = mesh.mesh_dim_names or tuple(f"d{i}" for i in range(len(sizes)))
    ranks = [int(rank) + rank_offset for rank in mesh.mesh.flatten().tolist()]
    order = getattr(tensor._spec, "shard_order", None)
    found = layout_of(tensor.dtype, tensor.shape, placements, dict(zip(names, sizes)), name, ranks, shard_order=order)
    _check_local(tensor, found, ranks)
    return found


def _check_local(tensor: Any, layout: Layout, ranks: list[int]) -> None:
    """Whether this rank holds as much as the layout says.

    Of uneven strided shards torch has two ideas: 9 rows over tp 2 and then dp 4 leave the last row with the last rank by FSDP and
    ``full_tensor``, with the one before by ``distribute_tensor``. Ours is FSDP's.
    """
    at = tensor.device_mesh.get_coordinate()
    if at is None:
        return
    wanted, found = layout.shard_shape(ranks[_position(tensor.device_mesh, at)]), list(tensor.to_local().shape)
    if found != wanted and (math.prod(found) or math.prod(wanted)):
        raise LayoutError(
            f"the shard here has shape {found}, not {wanted} as {tensor.placements} of {list(tensor.shape)} has it under FSDP\n"
            "hint: redistribute it to Shard placements first"
        )


def _position(mesh: DeviceMesh, at: Sequence[int]) -> int:
    """The place of a coordinate, row-major."""
    return functools.reduce(lambda place, of: place * of[0] + of[1], zip(mesh.mesh.shape, at), 0)


def layout_of(
    dtype: torch.dtype,
    shape: Any,
    placements: Any,
    axes: Mapping[str, int],
    name: str = "A",
    ranks: Any = None,
    *,
    shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
) -> Layout:
    """The layout of placements on a mesh with these axes, in the order of its dims.

    ``shard_order`` is torch's: pairs of a tensor dim and the mesh dims that shard it, the major one first.

    >>> print(layout_of(torch.bfloat16, (10, 4), [_StridedShard(0, split_factor=2), Shard(0)], {"dp": 2, "tp": 2}, "T", range(4)))
    bf16[10,4]@T{dp:2,tp:2}=0-3(tp+dp,_)
    """
    names, sizes = list(axes), list(axes.values())
    if len(placements) != len(names):
        raise LayoutError(f"{len(placements)} placements are given for a mesh of {len(names)} axes\nhint: one for each axis, in their order")
    for at, placement in enumerate(placements):
        _check(placement, at, len(shape))
    dims = _orders(placements, sizes, len(shape))
    if shard_order is not None and not any(isinstance(p, _StridedShard) for p in placements):
        for dim, order in shard_order:
            dims[dim] = list(order)
    parts = [at for at, placement in enumerate(placements) if placement.is_partial()]
    ops = sorted({str(placements[at].reduce_op) for at in parts})
    if len(ops) > 1 or not set(ops).issubset(REDUCTIONS):
        raise LayoutError(f"Partial({', '.join(ops)}) has no counterpart\nhint: one of {', '.join(REDUCTIONS)}")
    mesh, named = Mesh(name, ranks=ranks, **axes), [[names[axis] for axis in order] or None for order in dims]
    return Layout(dtype, list(shape), mesh, named, partial=[names[at] for at in parts] or None, op=ops[0] if ops else "sum")


def _check(placement: Any, at: int, num_dims: int) -> None:
    """Subclasses mean something else: the norm of parts, say, or parts under a mask."""
    if type(placement) not in (Shard, _StridedShard, Replicate, Partial):
        raise LayoutError(f"placement {at}, {placement!r}, has no counterpart\nhint: Shard, Replicate and Partial have")
    dim = getattr(placement, "dim", None)
    if dim is not None and not -num_dims <= dim < num_dims:
        raise LayoutError(f"placement {at}, {placement!r}: the tensor has {num_dims} dims")


def _orders(placements: Sequence[Any], sizes: list[int], num_dims: int) -> list[list[int]]:
    """For every dim the axes that shard it, the major one first."""
    orders: list[list[int]] = [[] for _ in range(num_dims)]
    for at in reversed(range(len(placements))):
        placement = placements[at]
        if isinstance(placement, (Shard, _StridedShard)):
            _nest(orders[placement.dim], at, sizes, placement)
    return orders


def _nest(order: list[int], axis: int, sizes: list[int], placement: Any) -> None:
    """Puts an axis where it splits: before all that follow it in the mesh, or behind as many parts as its split factor says."""
    factor, at = getattr(placement, "split_factor", 1), 0
    while factor > 1 and at < len(order) and factor % sizes[order[at]] == 0:
        factor //= sizes[order[at]]
        at += 1
    if factor != 1:
        raise LayoutError(f"{placement!r}: no nesting of the mesh's axes has this split factor")
    order.insert(at, axis)


def placements(layout: Layout) -> tuple[Shard | _StridedShard | Replicate | Partial, ...]:
    """The placements of a layout, one for every axis of its mesh; raises LayoutError naming what has no counterpart.

    >>> placements(Layout.parse("f32[8,6]@A{dp:2,tp:4}(tp+dp,_)"))
    (_StridedShard(dim=0, sf=4), Shard(dim=0))
    >>> placements(Layout.parse("f32[8,6]@A{dp:2,tp:2}(_,tp of 4+2)"))
    Traceback (most recent call last):
    crossmesh.LayoutError: ...
    """
    sizes = layout.axes
    place = {axis: at for at, axis in enumerate(sizes)}
    found: list[Any] = [Replicate()] * len(sizes)
    for dim, order in enumerate(layout.chunking_axes()):
        for at, axis in enumerate(order):
            factor = math.prod(sizes[other] for other in order[:at] if place[other] > place[axis])
            found[place[axis]] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    for axis in layout.partial:
        found[place[axis]] = Partial(layout.op)
    return tuple(found)


def device_mesh(layout: Layout, device_type: str = "cpu", *, rank_offset: int = 0) -> DeviceMesh:
    """torch's mesh of a layout; like any ``DeviceMesh`` it is made by all ranks of the job. ``rank_offset`` is taken off the layout's ranks."""
    ranks = torch.tensor([rank - rank_offset for rank in layout.ranks]).reshape(list(layout.axes.values()))
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(layout.axes))


def dtensor(layout: Layout, local: torch.Tensor | None, mesh: DeviceMesh) -> DTensor:
    """A shard as a DTensor of its layout, on a mesh as ``device_mesh`` makes it; nothing is copied. ``local`` is None where a rank holds nothing."""
    at = mesh.get_coordinate()
    rank = None if at is None else layout.ranks[_position(mesh, at)]
    shape = tuple(layout.shape)
    if rank is not None:
        wanted = tuple(layout.shard_shape(rank))
        if local is None and layout.holds(rank):
            raise ArrayError(f"rank {rank} of {layout}: a shard of shape {list(wanted)} is expected, none was given")
        if local is not None and tuple(local.shape) != wanted:
            raise ArrayError(f"rank {rank} of {layout}: a shard of shape {list(wanted)} is expected, {list(local.shape)} was given")
        if local is None:
            local = torch.empty(wanted, dtype=DTYPES[layout.dtype], device=mesh.device_type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements(layout), shape=torch.Size(shape), stride=stride, run_check=False)


DTYPES = {
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
