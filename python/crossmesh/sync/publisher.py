"""The trainer's side."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .. import Layout, _native
from .channel import SyncError
from .member import Member, bits, common, digests_of, part_of, region_key
from .rollcall import RollCall


class Publisher(Member):
    """Publishes weights, from every rank of a job; rank 0 holds the roll call at ``address``.

    ``names`` renames tensors (a function or a mapping), ``dtype`` is what they are cast to. Our place in the job comes from the launcher's
    environment, or from ``rank`` and ``size``.
    """

    side = "publisher"

    def __init__(
        self,
        address: str,
        *,
        dtype: str | None = None,
        names: Callable[[str], str] | Mapping[str, str] | None = None,
        rank: int | None = None,
        size: int | None = None,
        secret: str | None = None,
    ) -> None:
        super().__init__(address, rank, size, secret)
        self._dtype, self._names = dtype, names
        self._offered: dict[str, Any] = {}
        self._about: dict[str, dict] = {}
        self._version, self._since, self._hashes = None, None, {}
        # The snapshot is being read; it has not moved yet; the last version that everybody has.
        self._busy, self._pending, self._committed = False, False, None
        self._roll_call = RollCall(self._address, self._secret) if self.rank == 0 else None

    def offer(self, tensors: Any) -> None:
        """What is published from now on: a module, or values by name. A DTensor is offered as its shard; a pair of an array and a
        ``Layout`` of this job as the shard that the layout says; anything else as a whole tensor that every rank has.
        """
        if self._offered:
            raise SyncError("tensors were offered before\nhint: a publisher offers once; publish subsets by name")
        if hasattr(tensors, "state_dict"):
            tensors = tensors.state_dict()
        try:
            for name, value in tensors.items():
                self._offer(self._renamed(name), value)
        except SyncError:
            # All or nothing: what was refused may be offered again, put right.
            self._offered, self._about = {}, {}
            raise
        shapes = [(about["dtype"], about["local"]) for about in self._about.values()]
        self._arrays_made = _native.arrays(shapes)
        self._snapshot = dict(zip(self._about, self._arrays_made))
        self._views = {name: view_like(self._snapshot[name], value) for name, value in self._offered.items()}
        self._start()

    def _renamed(self, name: str) -> str:
        if self._names is None:
            return name
        return self._names(name) if callable(self._names) else self._names.get(name, name)

    def _offer(self, name: str, value: Any) -> None:
        if isinstance(value, tuple):
            value, layout = value
            if not isinstance(layout, Layout):
                raise SyncError(f"`{name}`: {layout!r} is no layout")
            _check_whole(name, layout)
            boxes, shape = (layout.boxes(self.rank) if self.rank in layout.ranks else []), layout.shape
        elif hasattr(value, "placements"):
            from ..torch import layout as layout_of

            layout = layout_of(value)
            _check_whole(name, layout)
            boxes, shape, value = layout.boxes(self.rank), layout.shape, value.to_local()
        else:
            shape = list(value.shape)
            boxes = [] if 0 in shape else [[(0, n) for n in shape]]
        self._offered[name] = value
        dtype = self._dtype or _dtype_name(value)
        self._about[name] = {"dtype": dtype, "shape": list(shape), "boxes": boxes, "local": list(value.shape)}

    def _tensors(self) -> dict:
        return {name: {k: about[k] for k in ("dtype", "shape", "boxes")} for name, about in self._about.items()}

    def _state(self) -> dict:
        return {"version": self._version}

    def publish(
        self,
        version: int,
        *,
        names: list[str] | None = None,
        changed_only: bool = False,
        values: Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        """Takes a snapshot, and returns; the version moves while training goes on. Where the last one is still being read, or other ranks
        have not published it yet, waits its turn; servers that are slow or gone are not waited for.

        ``names``: only these have changed. ``changed_only``: those whose bits have. ``values``: names and arrays to take instead of those
        that were offered, one by one, as an iterator makes them.
        """
        if not self._offered:
            raise SyncError("nothing was offered\nhint: call `offer` first")
        self._check()
        if self._version is not None and version <= self._version:
            raise SyncError(f"version {version} is not above {self._version}, which was published\nhint: versions only go up")
        if values is None and any(value is None for value in self._offered.values()):
            raise SyncError("what was offered is forgotten\nhint: give `values=`")
        for name in names or []:
            if name not in self._offered:
                raise SyncError(f"`{name}` was not offered")
        if self._pending:
            self._tell("wants")
        with self._lock:
            self._lock.wait_for(lambda: not (self._busy or self._pending) or self._closed)
            start = time.perf_counter()
            since, self._version = self._version, None
        self._at_rest()
        if values is None and not changed_only:
            self._copy_all(names)
            changed = names
        else:
            changed = self._copy_given(self._offered.items() if values is None else values, names, changed_only)
        with self._lock:
            self._version, self._since = version, since
            self._pending = self._channel is not None
            self._version_times = {"snapshot_s": time.perf_counter() - start}
        self._tell("published", version=version, changed=changed, since=since)

    def forget(self) -> None:
        """Lets go of what was offered; from now on ``publish`` is given ``values``."""
        self._offered = dict.fromkeys(self._offered)

    def _copy_all(self, names: list[str] | None) -> None:
        """Of what was offered, all or these, into the snapshot: in one call what is as it is published, and of torch's the others in another;
        a call a tensor costs more than a small tensor.
        """
        if names is None:
            arrays, values = self._arrays_made, list(self._offered.values())
        else:
            arrays, values = [self._snapshot[name] for name in names], [self._offered[name] for name in names]
        left = _native.copy_in(arrays, values)
        if not left:
            return
        names = list(self._offered) if names is None else names
        others = [(names[at], values[at]) for at in left]
        of_torch = [(name, value) for name, value in others if is_torch(value)]
        if of_torch:
            import torch

            with torch.no_grad():
                torch._foreach_copy_([self._view(name, value) for name, value in of_torch], [value for _, value in of_torch])
        if len(of_torch) < len(others):
            self._copy_each(((name, value) for name, value in others if not is_torch(value)), False)

    def _copy_given(self, given: Iterable[tuple[str, Any]], names: list[str] | None, changed_only: bool) -> list[str] | None:
        """Values as they come, which are to be all of those that are published; which have changed, None where that is not asked."""
        if names is not None:
            given = ((name, value) for name, value in given if name in names)
        taken, changed = self._copy_each(given, changed_only)
        missing = set(self._offered if names is None else names).difference(taken)
        if missing:
            raise SyncError(f"no value of `{min(missing)}` was given, nor of {len(missing) - 1} others")
        return None if names is None and not changed_only else changed

    def _copy_each(self, values: Iterable[tuple[str, Any]], changed_only: bool) -> tuple[set[str], list[str]]:
        """The same, one by one, as they come; which came, and which of them have other bits than before."""
        taken, changed = set(), []
        for name, value in values:
            cast_into(self._view(name, value), value, self._about[name]["dtype"])
            taken.add(name)
            if changed_only:
                (hash_now,) = _native.digests([bits(self._snapshot[name])])
                if self._hashes.get(name) == hash_now:
                    continue
                self._hashes[name] = hash_now
            changed.append(name)
        return taken, changed

    def _view(self, name: str, value: Any) -> Any:
        """Where a value goes, as its own library sees it."""
        view = self._views.get(name)
        if view is None:
            raise SyncError(f"`{name}` was not offered")
        if is_torch(view) != is_torch(value):
            view = self._views[name] = view_like(self._snapshot[name], value)
        if view.shape != value.shape:
            raise SyncError(f"`{name}` was offered with shape {self._about[name]['local']}, {list(value.shape)} is published")
        return view

    def wait(self, version: int, timeout_s: float = 60.0) -> None:
        """Until every subscriber has all of a version."""
        with self._lock:
            done = lambda: self._error is not None or (self._committed is not None and self._committed >= version)  # noqa: E731
            arrived = self._lock.wait_for(done, timeout_s)
        self._check()
        if not arrived:
            raise SyncError(f"version {version} has not arrived everywhere after {timeout_s} s: {self._waits_for}")

    # -- rounds

    def _arrays(self, said: dict) -> tuple[dict, dict]:
        with self._lock:
            if self._version != said["version"]:
                raise SyncError(f"version {said['version']} has gone")
            self._busy = True
        wanted = {name for member in self._roster if member["side"] == "subscriber" for name in member["tensors"]}
        names = [name for name in self._snapshot if name in wanted and (said["names"] is None or name in said["names"])]
        return {name: self._snapshot[name] for name in names if self._about[name]["boxes"]}, {}

    def _digests(self, said: dict) -> dict:
        """Of everything that a subscriber wants of us, box by box."""
        start, parts = time.perf_counter(), {}
        for member in self._roster:
            if member["side"] != "subscriber":
                continue
            for name, tensor in member["tensors"].items():
                if name not in self._about or (said["names"] is not None and name not in said["names"]):
                    continue
                mine = self._about[name]["boxes"]
                for box in mine:
                    for other in tensor["boxes"]:
                        region = common(box, other)
                        if region is not None and (key := region_key(name, region)) not in parts:
                            parts[key] = part_of(bits(self._snapshot[name]), mine, region)
        found = digests_of(parts)
        with self._lock:
            self._version_times["digest_s"] = time.perf_counter() - start
        return found

    def _on_over(self, said: dict) -> None:
        # What is given up may still be read: `_leave` is next.
        busy = not said["moved"] and self._give_up(said)
        with self._lock:
            self._busy = busy
            self._pending &= not said["moved"]
            self._lock.notify_all()

    def _on_go(self, said: dict) -> None:
        with self._lock:
            self._pending = False
            self._lock.notify_all()

    def _on_committed(self, said: dict) -> None:
        with self._lock:
            self._committed = said["version"]
            self._lock.notify_all()

    def _leave(self) -> None:
        super()._leave()
        self._on_over({"moved": self._channel is None})

    def close(self) -> None:
        super().close()
        if self._roll_call is not None:
            self._roll_call.close()


def _check_whole(name: str, layout: Layout) -> None:
    """A part of a sum is no value: servers would install one of the addends."""
    if layout.partial:
        raise SyncError(
            f"`{name}`: its shards are parts of a {layout.op} over {'+'.join(layout.partial)}, {layout}\n"
            "hint: combine them first: a DTensor's `redistribute` to Shard or Replicate does"
        )


def _dtype_name(value: Any) -> str:
    name = str(getattr(value.dtype, "name", value.dtype)).rsplit(".", 1)[-1]
    return _native.dtype(name)


def view_like(array: Any, value: Any) -> Any:
    """An array of ours as the library sees it that a value is of."""
    if is_torch(value):
        import torch

        return torch.from_dlpack(array)
    return bits(array)


def is_torch(value: Any) -> bool:
    return _of_torch(type(value))


@functools.cache
def _of_torch(kind: type) -> bool:
    """By type: looked up hundreds of times for every version that is published."""
    return kind.__module__.split(".")[0] == "torch"


def cast_into(view: Any, value: Any, dtype: str) -> None:
    """Copies a shard into a view of its library's, and casts it on the way."""
    if is_torch(value):
        view.copy_(value.detach())
        return
    value = np.asarray(value)
    if dtype == "bf16" and value.dtype == np.float32:
        # To the nearest, ties to even; a NaN stays one.
        raw = np.ascontiguousarray(value).view(np.uint32)
        rounded = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
        np.copyto(view, np.where(np.isnan(value), ((raw >> 16) | 0x40).astype(np.uint16), rounded))
    elif dtype in ("bf16", "f8e4m3", "f8e5m2"):
        if value.dtype.itemsize != view.dtype.itemsize:
            raise SyncError(f"numpy cannot cast {value.dtype} to {dtype}\nhint: give torch tensors, or its bits as unsigned numbers")
        np.copyto(view, value.view(view.dtype))
    else:
        np.copyto(view, value, casting="same_kind")
