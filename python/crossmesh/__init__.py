"""Move sharded tensors between device meshes: plan it at the bandwidth bound, prove it, predict it, run it.

>>> import crossmesh as cm
>>> trainer, server = cm.Mesh("T", fsdp=4), cm.Mesh("I", tp=2)
>>> src = cm.Layout("bf16", (6144, 4096), trainer, ("fsdp", None))
>>> dst = cm.Layout("bf16", (6144, 4096), server, ("tp of 4096+1024+1024", None))
>>> plan = cm.plan({"qkv": (src, dst)}, nic="400Gbit")
>>> plan.verify()
'every element arrives exactly once: 50331648 B in 8 transfers, no deadlock, no extra memory'
>>> round(plan.gap, 2)
1.0
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence

from . import _native
from ._job import Job, init
from ._native import (
    Array,
    ArrayError,
    CommError,
    CrossmeshError,
    Handle,
    HandleError,
    JobError,
    Layout,
    LayoutError,
    Plan,
    PlanError,
    Report,
    Simulation,
    __version__,
)

__all__ = [
    "Array",
    "ArrayError",
    "Cluster",
    "CommError",
    "CrossmeshError",
    "Handle",
    "HandleError",
    "Job",
    "JobError",
    "Layout",
    "LayoutError",
    "Mesh",
    "Plan",
    "PlanError",
    "Report",
    "Simulation",
    "__version__",
    "init",
    "plan",
    "read_plan",
]


class Mesh:
    """Named axes over ranks, row-major: ``Mesh("T", dp=2, tp=4, ranks=range(8))``.

    Without ``ranks`` a mesh takes the next free ones when it is planned.

    >>> print(Mesh("T", dp=2, tp=4, ranks=range(8)))
    T{dp:2,tp:4}=0-7
    """

    def __init__(self, name: str, *, ranks: Iterable[int] | None = None, **axes: int) -> None:
        self.name = name
        self.axes = dict(axes)
        self.ranks = None if ranks is None else [int(rank) for rank in ranks]

    def __str__(self) -> str:
        axes = ",".join(f"{axis}:{size}" for axis, size in self.axes.items())
        ranks = "" if self.ranks is None else "=" + _runs(self.ranks)
        return f"{self.name}{{{axes}}}{ranks}"

    def __repr__(self) -> str:
        return f"<Mesh {self}>"


class Cluster:
    """Hosts that are alike: ``Cluster(hosts=4, devices=8, nics=8, nic="400Gbit")``. Others are described in a file.

    >>> print(Cluster(hosts=2, devices=4, nic="100Gbit", latency="10us"))
    latency = "10us"
    [[host]]
    count = 2
    devices = 4
    nic = "100Gbit"
    """

    def __init__(
        self,
        hosts: int,
        devices: int,
        *,
        nics: int | None = None,
        nic: str | None = None,
        local: str | None = None,
        memory: str | None = None,
        latency: str | None = None,
    ) -> None:
        host = {"count": hosts, "devices": devices, "nics": nics, "nic": nic, "local": local, "memory": memory}
        lines = [] if latency is None else [f'latency = "{latency}"']
        lines.append("[[host]]")
        for key, value in host.items():
            if value is not None:
                lines.append(f"{key} = {value}" if isinstance(value, int) else f'{key} = "{value}"')
        self.toml = "\n".join(lines)

    @classmethod
    def of_ranks(cls, hosts: Iterable[str]) -> Cluster:
        """A device for every rank, on hosts by these names: ranks of one name in a row are on one host.

        >>> print(Cluster.of_ranks(["a", "a", "b"]))
        [[host]]
        devices = 2
        [[host]]
        devices = 1
        """
        cluster = cls(1, 1)
        counts = [len(list(run)) for _, run in itertools.groupby(hosts)]
        cluster.toml = "\n".join(f"[[host]]\ndevices = {count}" for count in counts)
        return cluster

    def __str__(self) -> str:
        return self.toml


def _runs(ranks: Sequence[int]) -> str:
    """Ranks as runs: 0-3,8."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


Pairs = Mapping[str, tuple[Layout | str, Layout | str]]


def plan(
    tensors: Pairs | tuple[Layout | str, Layout | str],
    *,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    nic: str | None = None,
    nics: int | None = None,
    local: str | None = None,
    latency: str | None = None,
    devices_per_host: int | None = None,
    strategy: str = "flow",
    chunk: str | int | None = None,
    max_extra_bytes: str | int | None = None,
    seed: int = 0,
    dst_rank_offset: int | None = None,
) -> Plan:
    """Plans tensors together, at the bandwidth bound of the cluster: described, in a file, or assumed with these NICs.

    ``tensors`` is ``{name: (before, after)}``, or one pair. ``dst_rank_offset``: the destinations are another job's, whose rank 0 is
    this rank here.

    >>> plan(("f32[8]@A{tp:2}(tp)", "f32[8]@B{tp:2}(_)"))
    <Plan of 1 tensors: 4 transfers, 64 B, by flow>
    """
    named = tensors.items() if isinstance(tensors, Mapping) else [("", tensors)]
    pairs = [(name, _layout(src), _layout(dst)) for name, (src, dst) in named]
    size = lambda value: None if value is None else str(value)  # noqa: E731
    return _native.plan(
        pairs,
        cluster=_cluster(cluster),
        nic=nic,
        nics=nics,
        local=local,
        latency=latency,
        devices_per_host=devices_per_host,
        strategy=strategy,
        chunk=size(chunk),
        max_extra_bytes=size(max_extra_bytes),
        seed=seed,
        dst_rank_offset=dst_rank_offset,
    )


def _cluster(cluster: Cluster | str | os.PathLike[str] | None) -> str | None:
    """The text of a cluster file."""
    if cluster is None or isinstance(cluster, Cluster):
        return None if cluster is None else cluster.toml
    try:
        with open(cluster, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise PlanError(f"cannot read the cluster file {os.fspath(cluster)}: {error.strerror}") from None


def _layout(layout: Layout | str) -> Layout:
    return Layout.parse(layout) if isinstance(layout, str) else layout


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan document, ``crossmesh.plan/1``."""
    with open(path, encoding="utf-8") as file:
        return _native.read_plan(file.read())


def __getattr__(name: str):
    """``crossmesh.torch``, ``.jax`` and the others are imported when they are used: neither torch nor JAX is required."""
    if name in ("torch", "jax", "models", "sync", "maps", "checkpoint"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
