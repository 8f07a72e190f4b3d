"""A rank's torch tensors as what its program reads and writes: held against the plan first, then seen box by box.

A shard is one array, in which boxes that differ in one dim lie beside each other (``Layout.shard_shape``, ``local_boxes``); with any strides, since a box of it is
a view. Where the layout itself says where its boxes lie, with gaps and strides, a shard is one row of memory instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import ArrayError, Layout, LayoutError, Plan, _native
from ._placements import DTYPES


def is_nccl(backend: str) -> bool:
    """Also nccl-legacy and nccl-lazy, which torch has beside it: they move memory of GPUs, and match messages by their order."""
    return backend.split("-")[0] == "nccl"


class Arrays:
    """What this rank brings to a plan: by buffer of its program, where the buffer's boxes are.

    Raises ArrayError with tensor, rank, what was expected and what was given; nothing has been sent then.
    """

    def __init__(self, plan: Plan, program: dict, rank: int, given: Mapping[str, Any], out: Any, backend: str) -> None:
        self.rank, self._pairs, self._backend = rank, plan.tensors, backend
        for what, arrays in (("tensors", given), ("out", {} if out is None else out)):
            self._check_names(what, arrays)
        self.device = self._device([*given.values(), *(out or {}).values()])
        self.out = empty(plan, rank, self.device) if out is None else out
        self._boxes, self._dtypes = program["boxes"], [DTYPES[tensor["dtype"]] for tensor in program["tensors"]]
        mine = program["ranks"][0] if program["ranks"] else {"buffers": [], "tiles": []}
        self._tiles = mine["tiles"]
        self._places: list[Array | Row] = []
        checked = []
        for buffer in mine["buffers"]:
            if buffer["role"] == "staging":
                self._places.append(Row(torch.empty(buffer["bytes"], dtype=torch.uint8, device=self.device)))
                continue
            is_out = buffer["role"] != "source"
            name, *layouts = self._pairs[buffer["tensor"]]
            whose = f"tensor `{name}` of rank {rank}, {'out' if is_out else 'source'}"
            tensor = self._tensor(self.out if is_out else given, name, layouts[is_out], whose)
            checked.append((whose, tensor, is_out))
            self._places.append(_place(tensor, layouts[is_out], rank, whose, is_out))
        _check_apart(checked)

    def _check_names(self, what: str, arrays: Any) -> None:
        if not isinstance(arrays, Mapping):
            raise ArrayError(f"{what} of rank {self.rank}: {type(arrays).__name__} is no dict of tensors by name")
        known = {name for name, *_ in self._pairs}
        for name in arrays:
            if name not in known:
                some = ", ".join(f"`{n}`" for n in sorted(known)[:5]) + (f", and {len(known) - 5} more" if len(known) > 5 else "")
                raise ArrayError(f"{what} of rank {self.rank} has `{name}`, which the plan does not know\nhint: it has {some}")

    def _device(self, given: list[Any]) -> torch.device:
        """Where the tensors have to be: all on one device, of the kind that the group's transport reads."""
        found = next((tensor.device for tensor in given if isinstance(tensor, torch.Tensor)), None)
        if is_nccl(self._backend):
            return found if found is not None and found.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
        cpu_only = self._backend in ("gloo", "mpi")
        return torch.device("cpu") if found is None or cpu_only or found.type == "meta" else found

    def _tensor(self, given: Mapping[str, Any], name: str, layout: Layout, whose: str) -> torch.Tensor:
        """The tensor by this name, once it is known to be what the layout needs; its shape is looked at by who knows the boxes."""
        if name not in given:
            raise ArrayError(f"{whose}: missing\nhint: give all shards that this rank holds, and all that it is to get, by name")
        found, wanted = given[name], DTYPES[layout.dtype]
        if isinstance(found, DTensor):
            raise ArrayError(f"{whose}: a DTensor was given\nhint: give the shard that it holds here, `to_local()`")
        if not isinstance(found, torch.Tensor) or found.layout != torch.strided:
            raise ArrayError(f"{whose}: a dense torch tensor is expected, {type(found).__name__} was given")
        if found.dtype != wanted:
            raise ArrayError(f"{whose}: dtype {wanted} is expected, {found.dtype} was given\nhint: cast it, or plan with its dtype")
        if found.device != self.device:
            why = f", which {self._backend} moves" if self._backend != "undefined" else ""
            raise ArrayError(f"{whose}: device {self.device} is expected{why}, {found.device} was given")
        return found.detach()

    def view(self, op: dict, number: int) -> torch.Tensor:
        """The box of an op inside a tile."""
        tile = self._tiles[number]
        held, box = self._boxes[tile["box"]], self._boxes[op["box"]]
        return self._places[tile["buffer"]].view(tile, held, box, self._dtypes[op["tensor"]])


class Array:
    """Boxes beside each other in an array, whatever its strides."""

    def __init__(self, tensor: torch.Tensor, places: list[tuple[list, list]]) -> None:
        self._tensor = tensor
        self._starts = {_key(box): [start for start, _ in local] for box, local in places}

    def view(self, tile: dict, held: list, box: list, dtype: torch.dtype) -> torch.Tensor:
        view = self._tensor
        for dim, (first, span, of) in enumerate(zip(self._starts[_key(held)], box, held)):
            view = view.narrow(dim, first + span[0] - of[0], span[1] - span[0])
        return view


class Row:
    """Boxes at places of their own in a row of elements, or of bytes."""

    def __init__(self, row: torch.Tensor) -> None:
        self._row = row

    def view(self, tile: dict, held: list, box: list, dtype: torch.dtype) -> torch.Tensor:
        width, row, strides = dtype.itemsize, self._row, tile.get("strides")
        if strides is None:
            strides, step = [0] * len(held), width
            for dim in reversed(range(len(held))):
                strides[dim] = step
                step *= held[dim][1] - held[dim][0]
        start = tile["offset"] + sum((b[0] - h[0]) * s for b, h, s in zip(box, held, strides))
        if row.dtype != dtype:
            row = row[tile["offset"] % width :].view(dtype) if row.numel() else row.view(dtype)
        return row.as_strided([b[1] - b[0] for b in box], [s // width for s in strides], row.storage_offset() + start // width)


def _key(box: list) -> tuple:
    return tuple(map(tuple, box))


def _place(tensor: torch.Tensor, layout: Layout, rank: int, whose: str, is_out: bool) -> Array | Row:
    """How a shard lies in a tensor, which has to have the shape for it."""
    if is_out and not _apart(tensor):
        raise ArrayError(f"{whose}: elements share memory: strides {tensor.stride()} for shape {tuple(tensor.shape)}\nhint: give a copy of it")
    try:
        wanted, local = layout.shard_shape(rank), layout.local_boxes(rank)
    except LayoutError:
        elements = layout.shard_elements(rank)
        if not tensor.is_contiguous() or tensor.numel() != elements:
            given = f"shape {list(tensor.shape)}" + ("" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}")
            raise ArrayError(f"{whose}: {elements} elements in one row are expected, {given} was given") from None
        return Row(tensor.reshape(-1))
    if list(tensor.shape) != wanted:
        raise ArrayError(f"{whose}: shape {wanted} is expected, {list(tensor.shape)} was given")
    return Array(tensor, list(zip(layout.boxes(rank), local)))


def _apart(tensor: torch.Tensor) -> bool:
    """Whether every element has bytes of its own: every dim steps over all that the finer ones reach."""
    if tensor.numel() == 0:
        return True
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride < reach:
            return False
        reach += stride * (size - 1)
    return True


def _check_apart(checked: list[tuple[str, torch.Tensor, bool]]) -> None:
    """What is written to shares bytes with nothing else."""
    about = [(t.data_ptr(), list(t.shape), list(t.stride()), t.element_size(), is_out) for _, t, is_out in checked]
    found = _native.sharing(about)
    if found is not None:
        (one, _, _), (other, _, _) = (checked[at] for at in found)
        raise ArrayError(f"{one}: it shares memory with {other}\nhint: give each tensor memory of its own")


def empty(plan: Plan, rank: int, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """Tensors for what a rank is to receive, by name."""
    out = {}
    for name, _, dst in plan.tensors:
        if rank in dst.ranks and dst.holds(rank):
            try:
                shape = dst.shard_shape(rank)
            except LayoutError:
                shape = [dst.shard_elements(rank)]
            out[name] = torch.empty(shape, dtype=DTYPES[dst.dtype], device=device)
    return out
