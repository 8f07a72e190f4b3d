"""Which part of every checkpoint tensor a model's own ``load_weights`` reads, found by watching it.

A worker of a tensor parallel group reads some rows or columns of a tensor. What it reads is known to its loaders and to nobody else, so they
are run once on tensors without memory::

    load_weights([("q_proj.weight", meta)])       narrow, view, chunk ...   remembered by where a view begins and ends
                                                  param.copy_(view)         -> these rows and columns are read; nothing is written

Where a tensor is used in any other way, all of it is wanted. Later, ``Watched`` stands by while the loaders run on tensors of which only those
parts are filled, and refuses a read of anything else before it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..sync import SyncError

Box = list[tuple[int, int]]
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default)


def read_by(load_weights: Callable[[Iterable], object], about: Mapping[str, tuple[torch.dtype, list[int]]]) -> dict[str, Box]:
    """The smallest box of every tensor, dtype and shape by name, that holds all that is read of it; all of it where that is not known."""
    whole = {name: [(0, n) for n in shape] for name, (_, shape) in about.items()}
    # A number is read by its value.
    scalars = {name for name, (_, shape) in about.items() if torch.Size(shape).numel() <= 1}
    sources = {
        name: torch.zeros(shape, dtype=dtype) if name in scalars else torch.empty(shape, dtype=dtype, device="meta")
        for name, (dtype, shape) in about.items()
    }
    watched = _Watch({name: source for name, source in sources.items() if name not in scalars})
    try:
        with torch.no_grad(), watched:
            load_weights(iter(sources.items()))
    except Exception as error:  # whatever a loader does with a tensor that has no memory
        raise SyncError(f"what the model reads of its tensors is not known: {type(error).__name__}: {error}") from error
    boxes = {name: whole[name] if name in watched.used else watched.boxes.get(name, [(0, 0)] * len(whole[name])) for name in about}
    # What nobody reads on this rank is wanted nowhere; an empty box is no box of a layout.
    return {name: whole[name] if name in scalars else box for name, box in boxes.items()}


class Watched:
    """Refuses, while it is entered, that anything but the boxes of some tensors is read."""

    def __init__(self, boxes: Mapping[str, Box]) -> None:
        self._boxes, self._mode = boxes, _Watch({}, self._check)

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if list(self._boxes[name]) != [(0, n) for n in tensor.shape]:
            self._mode.add(name, tensor)
        return tensor

    def _check(self, name: str, read: Box | None) -> None:
        held = self._boxes[name]
        if read is None or any(a < x or b > y for (a, b), (x, y) in zip(read, held)):
            raise SyncError(f"the model reads {read or 'all'} of `{name}`, of which only {held} was received\nhint: set slices=False")

    def __enter__(self) -> Watched:
        self._mode.__enter__()
        return self

    def __exit__(self, *what) -> None:
        self._mode.__exit__(*what)


class _Watch(TorchDispatchMode):
    """Sees every operation. Without ``check`` copies are noted and not made."""

    def __init__(self, sources: Mapping[str, torch.Tensor], check: Callable[[str, Box | None], None] | None = None) -> None:
        super().__init__()
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}
        self._checks = check
        self.boxes: dict[str, Box] = {}
        self.used: set[str] = set()
        for name, source in sources.items():
            self.add(name, source)

    def add(self, name: str, source: torch.Tensor) -> None:
        self._sources[source.untyped_storage()._cdata] = (name, source)

    def _source(self, value: object) -> tuple[str, torch.Tensor] | None:
        return self._sources.get(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [value for value in tree_leaves((args, kwargs or {})) if isinstance(value, torch.Tensor)]
        read = [(value, *source) for value in given if (source := self._source(value))]
        copies = func in _COPIES and self._source(args[0]) is None
        if not (func.is_view or func in _ALIASES):
            for value, name, source in read:
                self._note(name, box_of(value, source) if copies else None)
        # Of a model that is only looked at nothing is written, be it with what was made of a source, or with a number.
        if self._checks is None and (copies or func in _FILLS) and not _is_meta(args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, box: Box | None) -> None:
        if self._checks is not None:
            self._checks(name, box)
        elif box is None:
            self.used.add(name)
        else:
            seen = self.boxes.get(name, box)
            self.boxes[name] = [(min(a, x), max(b, y)) for (a, b), (x, y) in zip(seen, box)]


def _is_meta(value: object) -> bool:
    return any(tensor.device.type == "meta" for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor))


def box_of(view: torch.Tensor, source: torch.Tensor) -> Box:
    """The smallest box of a contiguous tensor that holds a view of it: exact for slices, whole rows for what was reshaped."""
    if view.numel() == 0:
        return [(0, 0)] * source.ndim
    first = view.storage_offset() - source.storage_offset()
    last = first + sum((n - 1) * step for n, step in zip(view.shape, view.stride()))
    corners = []
    for at in (first, last):
        corner = []
        for step in source.stride():
            corner.append(at // step)
            at %= step
        corners.append(corner)
    steps = {step: dim for dim, step in reversed(list(enumerate(source.stride()))) if source.shape[dim] > 1}
    is_slice = all(n == 1 or (step in steps and a + (n - 1) == b) for n, step, a, b in _dims(view, steps, corners))
    if is_slice:
        return [(a, b + 1) for a, b in zip(*corners)]
    row = source.stride()[0]
    return [(first // row, last // row + 1), *[(0, n) for n in source.shape[1:]]]


def _dims(view: torch.Tensor, steps: dict[int, int], corners: list[list[int]]) -> Iterable[tuple[int, int, int, int]]:
    """For every dim of a view: its length and step, and where it begins and ends in the source's dim of that step."""
    for n, step in zip(view.shape, view.stride()):
        dim = steps.get(step, 0)
        yield n, step, corners[0][dim], corners[1][dim]
