"""Layouts of JAX's shardings, both ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import Layout, LayoutError, Mesh


def layout(dtype: Any, shape: Sequence[int], sharding: Any, name: str = "A", *, rank_offset: int = 0) -> Layout:
    """The layout of a ``NamedSharding``; a device's id is its rank. ``unreduced`` axes hold parts of a sum.

    With ``jax.Array``: ``layout(x.dtype, x.shape, x.sharding)``. JAX has even shards only; a shape that an axis does not divide is split
    as everywhere else here, by torch.chunk's rule.
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


def spec(layout: Layout) -> Any:
    """The ``PartitionSpec`` of a layout; raises LayoutError naming what JAX has no counterpart for.

    >>> print(spec(Layout.parse("f32[8,6]@A{dp:2,tp:4}(tp+dp,_)")))
    P(('tp', 'dp'), None)
    >>> spec(Layout.parse("f32[10,6]@A{tp:4}(tp,_)"))
    Traceback (most recent call last):
    crossmesh.LayoutError: dim 0 is 10 long and split into 4 parts (tp): JAX has no uneven shards
    hint: pad the dim to a multiple of 4
    """
    from jax.sharding import PartitionSpec

    if layout.op not in (None, "sum"):
        raise LayoutError(f"parts that combine by {layout.op} have no counterpart\nhint: JAX's `unreduced` axes are sums")
    entries: list[Any] = []
    for dim, axes in enumerate(layout.chunking_axes()):
        parts = math.prod(layout.axes[axis] for axis in axes)
        if layout.shape[dim] % parts:
            raise LayoutError(
                f"dim {dim} is {layout.shape[dim]} long and split into {parts} parts ({'+'.join(axes)}): JAX has no uneven shards\n"
                f"hint: pad the dim to a multiple of {parts}"
            )
        entries.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*entries, unreduced=set(layout.partial)) if layout.partial else PartitionSpec(*entries)


def sharding(layout: Layout, mesh: Any = None, *, rank_offset: int = 0) -> Any:
    """The ``NamedSharding`` of a layout, on a mesh of JAX's, or on one of the devices whose ids are the layout's ranks, less ``rank_offset``.

    A mesh that is made here has explicit axes where there are parts of a sum, since JAX has ``unreduced`` only there.
    """
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import Mesh as JaxMesh

    found = spec(layout)
    if mesh is None:
        known = {device.id: device for device in jax.devices()}
        ids = [rank - rank_offset for rank in layout.ranks]
        missing = [at for at in ids if at not in known]
        if missing:
            raise LayoutError(f"rank {missing[0] + rank_offset} of {layout}: JAX has no device {missing[0]}, but {len(known)} devices")
        devices = np.array([known[at] for at in ids]).reshape(tuple(layout.axes.values()))
        kinds = (AxisType.Explicit if layout.partial else AxisType.Auto,) * len(layout.axes)
        mesh = JaxMesh(devices, tuple(layout.axes), axis_types=kinds)
    elif dict(mesh.shape) != layout.axes or [device.id + rank_offset for device in mesh.devices.flat] != layout.ranks:
        raise LayoutError(f"{mesh} is not the mesh of {layout}\nhint: the same axes over the same devices, in one order")
    return NamedSharding(mesh, found)
