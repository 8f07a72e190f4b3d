"""This process as a rank of a job, and plans that our engine runs."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from . import _native
from ._native import JobError

if TYPE_CHECKING:
    from . import Cluster

_joined: Job | None = None


class Job:
    """A rank of a job: ``rank``, ``size``, ``cluster``; ``start``, ``run``, ``close``. Made by :func:`init`."""

    def __init__(self, native: _native.Job) -> None:
        self._native = native
        self.rank: int = native.rank
        self.size: int = native.size
        self.launcher: str = native.launcher
        self.hosts: list[str] = native.hosts

    @property
    def cluster(self) -> Cluster:
        """The hosts of the ranks, in the order of the ranks, for :func:`crossmesh.plan`; say ``nic=`` and ``local=`` there, if you know them."""
        from . import Cluster

        return Cluster.of_ranks(self.hosts)

    def start(self, plan, mine=None, out=None) -> _native.Handle:
        """Starts a plan on this rank's shards, by name, and returns at once; every rank of the job starts it.

        ``mine`` and ``out`` are numpy arrays, torch tensors, arrays of ``plan.empty`` or whatever speaks DLPack, used where they lie, with
        any strides; until ``wait`` has returned, nobody else touches them. Without ``out``, arrays are made: ``handle.out``.
        """
        return self._native.start(plan, _dict(mine), _dict(out))

    def run(self, plan, mine=None, out=None, *, timeout_s: float | None = None) -> dict:
        """Starts a plan, waits for it, and returns what arrived."""
        return self._native.run(plan, _dict(mine), _dict(out), timeout_s=timeout_s)

    def close(self) -> None:
        """Leaves the job once the others are ready to. With a transfer under way they are told so instead."""
        global _joined
        if _joined is self:
            _joined = None
            atexit.unregister(self.close)
        self._native.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._native)


def _dict(arrays):
    return arrays if arrays is None or isinstance(arrays, dict) else dict(arrays)


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    secret: str | None = None,
    protect: str | None = None,
    attempt: int = 0,
    arrive_s: float = 60.0,
    deadline_s: float = 10.0,
) -> Job:
    """Joins the job that torchrun, srun, mpirun or ``crossmesh launch`` started this process for, and waits for the others.

    ``rank``, ``size``, ``address`` ("host:port" of rank 0), ``secret`` and ``protect`` ("none", "sign" or "encrypt": what is done to all
    that passes between hosts, the same on all ranks) go before what the environment says.
    A failure ends the job and not the process: whoever is left closes it and meets again, as ranks of a new world, with ``attempt=1``,
    then 2; processes that still hold on to an earlier meeting are turned away. Ranks may take
    ``arrive_s`` to come; a transfer that nothing moves for ``deadline_s`` fails, with the name of the rank that is to blame. One thread moves
    the bytes. The job is left by ``close``, or when the process ends.
    """
    global _joined
    if _joined is not None:
        raise JobError("this process is in a job already\nhint: close that one first")
    options = dict(rank=rank, size=size, address=address, secret=secret, protect=protect, attempt=attempt)
    options.update(arrive_s=arrive_s, deadline_s=deadline_s)
    job = Job(_native.join(**options))
    _joined = job
    atexit.register(job.close)
    return job


def _forget() -> None:
    """A fork has no engine; it may join a job of its own."""
    global _joined
    if _joined is not None:
        atexit.unregister(_joined.close)
    _joined = None


os.register_at_fork(after_in_child=_forget)
