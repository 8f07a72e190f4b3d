"""Checkpoints of any format, for any parallelism: Hugging Face safetensors, torch DCP, Megatron ``torch_dist``, ours.

>>> import crossmesh as cm
>>> ck = cm.checkpoint.open("run/iter_0000100")                            # doctest: +SKIP
>>> for problem in ck.check(): print(problem)                              # doctest: +SKIP
>>> cm.checkpoint.convert(ck, "out-hf", to="hf", max_memory="1GiB")        # doctest: +SKIP
>>> cm.checkpoint.load(ck, into=model.state_dict())                        # doctest: +SKIP

Nothing of a file is executed: pickles are read as words, and one that names anything else than tensors is refused.
"""

from __future__ import annotations

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


def open(path: Path) -> Checkpoint:
    """Opens a folder or a safetensors file. The format is told by its content; headers are read, no tensor."""
    return Checkpoint.open(os.fspath(path))


def _opened(checkpoint: Checkpoint | Path) -> Checkpoint:
    return checkpoint if isinstance(checkpoint, Checkpoint) else open(checkpoint)


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
    max_memory: str | int = "1GiB",
    shard_size: str | int | None = None,
    leave_out: Sequence[str] = (),
    config: Path | None = None,
    from_names: str | None = None,
    to_names: str | None = None,
    spelling: str | None = None,
    progress: bool | Callable[[int, int], Any] = False,
) -> dict[str, Any]:
    """Writes a checkpoint as another: ``hf``, ``dcp``, ``dcp-hf`` or ``torch_dist``.

    ``names`` is a map of names, by family or file, where they change; ``tp``, ``pp`` and ``ep`` cut the model as that map says, ``ranks`` cuts
    the first dim of everything. Streams under ``max_memory``. The output is complete or not there; after a kill the same call goes on.
    Returns what was done, and what the target had no place for under ``left_out``.
    """
    shown = _show if progress is True else (progress or None)
    return _opened(checkpoint).convert(
        os.fspath(output),
        progress=shown,
        **_options(locals()),
    )


def explain(checkpoint: Checkpoint | Path, *, to: str, **options: Any) -> str:
    """What ``convert`` with these options would do: which boxes come from which bytes of which file. Nothing is written."""
    return _opened(checkpoint).explain(**_options({"to": to, **options}))


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


def diff(one: Checkpoint | Path, two: Checkpoint | Path, *, max_memory: str = "1GiB") -> list[str]:
    """In what two checkpoints differ, tensor by tensor: names, shapes, types, and every number as bits."""
    return _opened(one).diff(_opened(two), max_memory=max_memory)


def load(
    checkpoint: Checkpoint | Path,
    into: Mapping[str, Any],
    *,
    names: Path | None = None,
    to_names: str = "hf",
    config: str | None = None,
    strict: bool = True,
    max_memory: str = "256MiB",
) -> dict[str, int]:
    """Fills the tensors of a state dict in place, and reads only the boxes that this rank holds.

    Values are torch tensors, DTensors, numpy arrays, or a pair of one and its box, as ``(array, [(0, 4), (8, 16)])``. Real numbers are
    rounded to the type that is there. ``names`` is a map under whose side ``to_names`` the state dict's names are. A name that the checkpoint
    does not have is an error, unless ``strict`` is false.
    """
    opened = _opened(checkpoint)
    if names is not None:
        opened = opened.renamed(os.fspath(names), to_names, config=config)
    known = opened.tensors
    wants, keep, after = [], [], []
    for name, value in _flat(into):
        if name not in known and not strict:
            continue
        array, box = value if isinstance(value, tuple) else (value, None)
        want = _Array(name, array, box, known)
        wants.append((name, want.box, want.dtype, want.address, want.strides))
        keep.append(want)
        after.extend(want.after)
    done, read = opened.load_at(wants, max_memory)
    for copy in after:
        copy()
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
        self.after: list[Callable[[], Any]] = []
        if type(array).__module__.startswith("numpy"):
            self._numpy(name, array)
        else:
            box = self._torch(name, array, box)
        self.box = [(0, size) for size in self.shape] if box is None else [(int(a), int(b)) for a, b in box]
        sizes = [end - start for start, end in self.box]
        if sizes != self.shape:
            raise CheckpointError(f"tensor `{name}`: the box {self.box} does not fit an array of {self.shape}")
        whole = known.get(name, (None, tuple(self.shape)))[1]
        if box is None and list(whole) != self.shape:
            raise CheckpointError(f"tensor `{name}`: {list(whole)} in the checkpoint, {self.shape} here\nhint: a part of it is a pair with its box")

    def _numpy(self, name: str, array: Any) -> None:
        if not array.flags.writeable:
            raise CheckpointError(f"tensor `{name}`: its array is read-only")
        self.keep, self.shape, self.dtype = array, list(array.shape), array.dtype.name
        self.address, self.strides = array.__array_interface__["data"][0], list(array.strides)
        if any(stride < 0 for stride in self.strides):
            raise CheckpointError(f"tensor `{name}`: its array runs backwards")

    def _torch(self, name: str, array: Any, box: Any) -> Any:
        import torch

        local = array
        if hasattr(array, "to_local"):
            local, box = array.to_local(), _box(name, array)
        local = local.detach()
        if local.device.type != "cpu":
            there, local = local, torch.empty(local.shape, dtype=local.dtype)
            self.after.append(lambda: there.copy_(local))
        self.keep, self.shape, self.dtype = local, list(local.shape), str(local.dtype).removeprefix("torch.")
        self.address = local.data_ptr()
        self.strides = [stride * local.element_size() for stride in local.stride()]
        return box


def _box(name: str, array: Any) -> list[tuple[int, int]]:
    """The box of a DTensor's local part."""
    import torch.distributed as dist

    from .torch import layout

    boxes = layout(array).boxes(dist.get_rank())
    if not boxes:
        return [(0, size) for size in array.to_local().shape]
    if len(boxes) > 1:
        raise CheckpointError(f"tensor `{name}`: its local part is {len(boxes)} boxes\nhint: give each as a pair of a view and its box")
    return boxes[0]
