"""The side of whoever serves the weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import Layout, _native
from .channel import SyncError
from .member import Member, bits, common, digests_of, logger, part_of, region_key
from .publisher import _dtype_name


@dataclass(frozen=True)
class Slot:
    """Where a published tensor goes: which part of it (``layout``, in this job's ranks), into which ``param``, and there into which part
    (``index``, slices of this rank's array): a fused weight is several slots of one parameter.
    """

    param: str
    layout: Layout
    index: tuple = ()


class Subscriber(Member):
    """Receives weights, on every rank of a job, beside those that serve; ``install`` copies a whole version.

    ``into`` are this rank's arrays by name, or pairs of a dtype and a shape: of these, the version that ``poll`` saw is looked at where it
    arrived, in ``staged``, until ``install`` is called. ``layouts`` says, by published name, which part of the tensor this rank wants: a ``Layout`` of
    this job, or a :class:`Slot`; without ``layouts``, all of them are wanted whole. ``dtype`` is what the arrays hold, where they cannot say:
    numpy has bf16 as 16-bit numbers.
    """

    side = "subscriber"

    def __init__(
        self,
        address: str,
        into: Mapping[str, Any],
        layouts: Mapping[str, Layout | Slot] | None = None,
        *,
        dtype: str | None = None,
        rank: int | None = None,
        size: int | None = None,
        secret: str | None = None,
    ) -> None:
        super().__init__(address, rank, size, secret)
        about = lambda value: value if isinstance(value, tuple) else (dtype or _dtype_name(value), value.shape)  # noqa: E731
        shapes = [(name, list(shape)) for name, shape in map(about, into.values())]
        self._staging = dict(zip(into, _native.arrays(shapes)))
        self._into = {name: value for name, value in into.items() if not isinstance(value, tuple)}
        self._slots, self._wanted = {}, {}
        layouts = {name: name for name in into} if layouts is None else layouts
        for name, layout in layouts.items():
            self._want(name, layout)
        self._staged, self._installed, self._ready = None, None, None
        self._start()

    def _want(self, name: str, layout: Layout | Slot | str) -> None:
        param, index = (layout.param, layout.index) if isinstance(layout, Slot) else (name, ())
        if param not in self._staging:
            raise SyncError(f"`{name}` goes into `{param}`, which is none of this rank's arrays")
        array = self._staging[param]
        part = bits(array)[(*index, ...)]  # a view, of a number too
        if isinstance(layout, str):
            shape = list(part.shape)
            boxes = [] if 0 in shape else [[(0, n) for n in shape]]
        else:
            layout = layout.layout if isinstance(layout, Slot) else layout
            shape = layout.shape
            boxes = layout.boxes(self.rank) if self.rank in layout.ranks else []
            if boxes and list(part.shape) != layout.shard_shape(self.rank):
                raise SyncError(f"`{name}`: its part of `{param}` has shape {list(part.shape)}, {layout} has {layout.shard_shape(self.rank)} here")
        self._slots[name] = part
        self._wanted[name] = {"dtype": array.dtype, "shape": list(shape), "boxes": boxes}

    def _tensors(self) -> dict:
        return self._wanted

    def _state(self) -> dict:
        return {"staged": self._staged, "ready": self._ready, "installed": self._installed}

    @property
    def version(self) -> int | None:
        """The version that is installed."""
        return self._installed

    @property
    def ready(self) -> int | None:
        """The version that ``install`` would copy."""
        return self._ready

    @property
    def staged(self) -> dict[str, _native.Array]:
        """What arrived, by name: a whole version from when ``poll`` says so to ``install``."""
        return dict(self._staging)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether a whole version is here, and everywhere, whose digests hold, and that is not installed."""
        self._check()
        with self._lock:
            return self._lock.wait_for(lambda: self._ready is not None or self._error is not None, timeout_s) and self._ready is not None

    def install(self) -> int:
        """Copies the version that `poll` saw into the arrays, and returns it."""
        with self._lock:
            if self._ready is None:
                raise SyncError("no version is ready\nhint: `poll` says when one is")
            start = time.perf_counter()
            for name, value in self._into.items():
                copy_out(self._staging[name], value)
            self._installed, self._ready = self._ready, None
            self._version_times = {"install_s": time.perf_counter() - start} | {k: v for k, v in self._version_times.items() if k == "check_s"}
        self._tell("installed", version=self._installed)
        return self._installed

    # -- rounds

    def _arrays(self, said: dict) -> tuple[dict, dict]:
        with self._lock:
            if self._ready is not None:
                raise SyncError(f"version {self._ready} is not installed")
            self._staged = None
        names = [name for name in self._slots if said["names"] is None or name in said["names"]]
        self._moving_names = names
        return {}, {name: self._slots[name] for name in names if self._wanted[name]["boxes"]}

    def _digests(self, said: dict) -> dict:
        return {}

    def _on_check(self, said: dict) -> None:
        start = time.perf_counter()
        wrong = self._first_wrong(said["digests"])
        with self._lock:
            self._version_times["check_s"] = time.perf_counter() - start
            version = self._times.get("version")
            if wrong is None:
                self._staged = version
        if wrong is not None:
            logger.warning("version %s is refused: %s", version, wrong)
        self._tell("checked", round=said["round"], wrong=wrong)

    def _first_wrong(self, digests: dict) -> str | None:
        """The first box whose bits are not those that were published, and whose it was."""
        parts, whose = {}, {}
        for member in self._roster:
            if member["side"] != "publisher":
                continue
            for name in self._moving_names:
                wanted = self._wanted[name]["boxes"]
                for offered in member["tensors"].get(name, {"boxes": []})["boxes"]:
                    for box in wanted:
                        region = common(box, offered)
                        if region is not None:
                            key = region_key(name, region)
                            parts[key], whose[key] = part_of(self._slots[name], wanted, region), member["name"]
        for key, found in digests_of(parts).items():
            if digests.get(key) != found:
                return f"tensor `{key}` of subscriber {self.rank} is not what {whose[key]} published"
        return None

    def _on_commit(self, said: dict) -> None:
        with self._lock:
            if self._staged == said["version"] and self._installed != said["version"]:
                self._ready = said["version"]
                self._lock.notify_all()

    def _on_void(self, said: dict) -> None:
        self._give_up(said)
        with self._lock:
            self._staged = self._ready = None


def copy_out(staged: Any, value: Any) -> None:
    if type(value).__module__.startswith("torch"):
        import torch

        with torch.no_grad():
            value.copy_(torch.from_dlpack(staged))
    else:
        np.copyto(value, bits(staged).view(value.dtype))
