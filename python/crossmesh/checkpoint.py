"""Checkpoints of any format, for any parallelism: Hugging Face safetensors, torch DCP, Megatron ``torch_dist``, ours.

>>> import crossmesh as cm
>>> ck = cm.checkpoint.open("run/iter_0000100")                            # doctest: +SKIP
>>> for problem in ck.check(): print(problem)                              # doctest: +SKIP
>>> cm.checkpoint.convert(ck, "out-hf", to="hf", max_memory="1GiB")        # doctest: +SKIP
>>> cm.checkpoint.load(ck, into=model.state_dict())                        # doctest: +SKIP

Nothing of a file is executed: pickles are read as words, and one that names anything else than tensors is refused.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._native import Checkpoint, CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "Problem", "check", "convert", "diff", "explain", "load", "open"]

Path = str | os.PathLike[str]


class Problem(NamedTuple):
    """What is wrong with a checkpoint; of a warning, what cannot be known."""

    kind: str
    warning: bool
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def open(path: Path, *, max_memory: str | int | None = None) -> Checkpoint:
    """Opens a folder or a safetensors file. The format is told by its content; headers are read, no tensor.

    A ``.metadata`` that takes more memory than ``max_memory`` and 256 MiB is refused; without it, 4 GiB are allowed.
    """
    return Checkpoint.open(os.fspath(path), max_memory=max_memory)


def _opened(checkpoint: Checkpoint | Path, max_memory: str | int | None = None) -> Checkpoint:
    return checkpoint if isinstance(checkpoint, Checkpoint) else open(checkpoint, max_memory=max_memory)


def check(checkpoint: Checkpoint | Path) -> list[Problem]:
    """Everything that is wrong: missing and short files, boxes that overlap, holes; and what cannot be known, as warnings."""
    return [Problem(*problem) for problem in _opened(checkpoint).check()]


def convert(
    checkpoint: Checkpoint | Path,
    output: Path,
    *,
    to: str,
    names: Path | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    ranks: int | None = None,
    dtype: Any = None,
    max_memory: str | int | None = None,
    shard_size: str | int | None = None,
    leave_out: Sequence[str] = (),
    config: Path | None = None,
    from_names: str | None = None,
    to_names: str | None = None,
    spelling: str | None = None,
    progress: bool | Callable[[int, int], Any] = False,
) -> dict[str, Any]:
    """Writes a checkpoint as another: ``hf``, ``dcp``, ``dcp-hf``, ``torch_dist`` or ``crossmesh``, which is ours.

    ``names`` is a map of names, by family or file, where they change; ``tp``, ``pp`` and ``ep`` cut the model as that map says, ``ranks`` cuts
    the first dim of everything. Streams under ``max_memory``, 1 GiB where nothing is said. The output is complete or not there; after a kill, Ctrl-C, or an exception of
    ``progress``, the same call goes on with what stays in ``.OUTPUT.partial``. ``progress`` gets the bytes done and all bytes.
    Returns what was done, and what the target had no place for under ``left_out``.
    """
    shown = _show if progress is True else (progress or None)
    return _opened(checkpoint, max_memory).convert(
        os.fspath(output),
        progress=shown,
        **_options(locals()),
    )


def explain(checkpoint: Checkpoint | Path, *, to: str, **options: Any) -> str:
    """What ``convert`` with these options would do: which boxes come from which bytes of which file. Nothing is written."""
    for key in options:
        if key not in _KEYS:
            raise TypeError(f"explain() got an unexpected keyword argument {key!r}")
    return _opened(checkpoint, options.get("max_memory")).explain(**_options({"to": to, **options}))


_KEYS = (
    "to names tp pp ep ranks dtype max_memory shard_size leave_out config from_names to_names spelling".split()
)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: given[key] for key in _KEYS if given.get(key) is not None}
    for key in ("names", "config"):
        if key in options:
            options[key] = os.fspath(options[key])
    if "leave_out" in options:
        options["leave_out"] = list(options["leave_out"])
    return options


def _show(done: int, total: int) -> None:
    end = "\n" if done >= total else "\r"
    print(f"{done / 2**20:10.0f} of {total / 2**20:.0f} MiB", end=end, file=sys.stderr, flush=True)


def diff(one: Checkpoint | Path, two: Checkpoint | Path, *, max_memory: str | int | None = None) -> list[str]:
    """In what two checkpoints differ, tensor by tensor: names, shapes, types, and every number as bits."""
    return _opened(one, max_memory).diff(_opened(two, max_memory), max_memory=max_memory)


def load(
    checkpoint: Checkpoint | Path,
    into: Mapping[str, Any],
    *,
    names: Path | None = None,
    to_names: str = "hf",
    config: Path | None = None,
    strict: bool = True,
    max_memory: str | int | None = None,
) -> dict[str, int]:
    """Fills the tensors of a state dict in place, and reads only the boxes that this rank holds.

    Values are torch tensors, DTensors, numpy arrays, or a pair of one and its box, as ``(array, [(0, 4), (8, 16)])``. Real numbers are
    rounded to the type that is there. Buffers take ``max_memory``, 256 MiB where nothing is said. ``names`` is a map under whose side ``to_names`` the state dict's names are, and ``config`` the model's
    config.json, where the checkpoint has none. A name that the checkpoint does not have is an error, unless ``strict`` is false, or its memory is that of a name that is there: tied weights are loaded once, and
    are an error where the checkpoint has two that differ.
    """
    opened = _opened(checkpoint, max_memory)
    if names is not None:
        path = None if config is None else os.fspath(config)
        opened = opened.renamed(os.fspath(names), to_names, config=path)
    known = opened.tensors
    arrays: dict[tuple[Any, ...], _Array] = {}
    twins: list[tuple[_Array, _Array]] = []
    # Of names with one memory, one that the checkpoint has comes first.
    for name, value in sorted(_flat(into), key=lambda item: item[0] not in known):
        if name not in known and not strict:
            continue
        array, box = value if isinstance(value, tuple) else (value, None)
        want = _Array(name, array, box, known)
        first = arrays.setdefault(want.memory(), want)
        if first is not want and name in known:
            twins.append((first, want.aside()))
    wants = [*arrays.values(), *(twin for _, twin in twins)]
    places = [(w.name, w.box, w.dtype, w.address, w.strides) for w in wants]
    done, read = opened.load_at(places, "256MiB" if max_memory is None else max_memory)
    for first, twin in twins:
        if not first.same_bits(twin):
            raise CheckpointError(
                f"tensors `{first.name}` and `{twin.name}` are one array here, and differ in the checkpoint"
                "\nhint: untie them, or leave one of them out of what is loaded"
            )
    for want in wants:
        want.finish()
    return {"tensors": len(wants), "bytes": done, "bytes_read": read}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, tuple) or hasattr(value, "shape"):
            yield f"{prefix}{key}", value


class _Array:
    """An array that is filled: its box, where it lies, and what is left to do afterwards."""

    def __init__(self, name: str, array: Any, box: Any, known: Mapping[str, Any]) -> None:
        self.name, self.finish = name, lambda: None
        if type(array).__module__.startswith("numpy"):
            self._numpy(array)
        elif hasattr(array, "data_ptr") and hasattr(array, "detach"):
            box = self._torch(array, box)
        else:
            kind = f"{type(array).__module__}.{type(array).__name__}"
            raise CheckpointError(
                f"tensor `{name}`: a {kind} cannot be filled in place\nhint: load into a numpy array, and make one of it afterwards"
            )
        self.box = [(0, size) for size in self.shape] if box is None else [(int(a), int(b)) for a, b in box]
        sizes = [end - start for start, end in self.box]
        if sizes != self.shape:
            raise CheckpointError(f"tensor `{name}`: the box {self.box} does not fit an array of {self.shape}")
        whole = known.get(name, (None, tuple(self.shape)))[1]
        if box is None and list(whole) != self.shape:
            raise CheckpointError(f"tensor `{name}`: {list(whole)} in the checkpoint, {self.shape} here\nhint: a part of it is a pair with its box")
        if any(size > 1 and stride == 0 for size, stride in zip(self.shape, self.strides)):
            raise CheckpointError(f"tensor `{name}`: its array has several elements in one place\nhint: one that was expanded is copied first")

    def memory(self) -> tuple[Any, ...]:
        """What is equal for two names of one array. Empty arrays are nobody's."""
        if 0 in self.shape:
            return (self.name,)
        return (self.there, self.dtype, *self.shape, *self.strides)

    def aside(self) -> _Array:
        """The same with memory of its own, to be compared with what the other name brings."""
        import numpy as np

        size = int(np.prod(self.shape)) * self.itemsize
        self.keep, self.finish = np.zeros(size, np.uint8), lambda: None
        self.address, self.strides = self.keep.ctypes.data, _dense(self.shape, self.itemsize)
        return self

    def same_bits(self, twin: _Array) -> bool:
        """Whether this array holds what another of its shape does."""
        import numpy as np

        raw = (ctypes.c_uint8 * (1 + self._last())).from_address(self.address)
        mine = np.lib.stride_tricks.as_strided(
            np.frombuffer(raw, np.uint8), (*self.shape, self.itemsize), (*self.strides, 1), writeable=False
        )
        return bool(np.array_equal(mine.reshape(-1), twin.keep))

    def _last(self) -> int:
        return sum((size - 1) * stride for size, stride in zip(self.shape, self.strides)) + self.itemsize - 1

    def _numpy(self, array: Any) -> None:
        if not array.flags.writeable:
            raise CheckpointError(f"tensor `{self.name}`: its array is read-only")
        self.keep, self.shape, self.dtype = array, list(array.shape), array.dtype.name
        self.address, self.strides = array.__array_interface__["data"][0], list(array.strides)
        self.there, self.itemsize = ("cpu", self.address), array.itemsize
        if any(stride < 0 for stride in self.strides):
            raise CheckpointError(f"tensor `{self.name}`: its array runs backwards")

    def _torch(self, array: Any, box: Any) -> Any:
        import torch

        local = array
        if hasattr(array, "to_local"):
            local, box = array.to_local(), _box(self.name, array)
        local = local.detach()
        self.there = (str(local.device), local.data_ptr())
        if local.device.type != "cpu":
            there, local = local, torch.empty(local.shape, dtype=local.dtype)
            self.finish = lambda: there.copy_(local)
        self.keep, self.shape, self.dtype = local, list(local.shape), str(local.dtype).removeprefix("torch.")
        self.address, self.itemsize = local.data_ptr(), local.element_size()
        self.strides = [stride * self.itemsize for stride in local.stride()]
        return box


def _dense(shape: Sequence[int], itemsize: int) -> list[int]:
    """Strides in bytes of an array without gaps."""
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def _box(name: str, array: Any) -> list[tuple[int, int]]:
    """The box of a DTensor's local part."""
    if any(placement.is_partial() for placement in array.placements):
        raise CheckpointError(
            f"tensor `{name}`: its parts are still to be added up: {array.placements}\nhint: redistribute it to Replicate or Shard first"
        )
    import torch.distributed as dist

    from .torch import layout

    boxes = layout(array).boxes(dist.get_rank())
    if not boxes:
        return [(0, size) for size in array.to_local().shape]
    if len(boxes) > 1:
        raise CheckpointError(f"tensor `{name}`: its local part is {len(boxes)} boxes\nhint: give each as a pair of a view and its box")
    return boxes[0]
