"""Layouts of JAX's shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import Layout, LayoutError, Mesh


def layout(dtype: Any, shape: Sequence[int], sharding: Any, name: str = "A", *, rank_offset: int = 0) -> Layout:
    """The layout of a ``NamedSharding``; a device's id is its rank. ``unreduced`` axes hold parts of a sum.

    With ``jax.Array``: ``layout(x.dtype, x.shape, x.sharding)``.
    """
    if type(sharding).__name__ != "NamedSharding":
        raise LayoutError(f"{type(sharding).__name__} has no counterpart\nhint: NamedSharding has")
    axes = dict(sharding.mesh.shape)
    ranks = [device.id + rank_offset for device in sharding.mesh.devices.flat]
    entries = getattr(sharding.spec, "partitions", None) or tuple(sharding.spec)
    dims = [_axes(entry, sharding) for entry in entries] + [None] * (len(shape) - len(entries))
    unreduced = [axis for axis in axes if axis in (getattr(sharding.spec, "unreduced", None) or ())]
    return Layout(dtype, list(shape), Mesh(name, ranks=ranks, **axes), dims, partial=unreduced or None)


def _axes(entry: Any, sharding: Any) -> list[str] | None:
    if entry is None or entry == ():
        return None
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, tuple):
        return list(entry)
    raise LayoutError(f"{entry} in {sharding.spec} has no counterpart\nhint: None, an axis or a tuple of axes has")
