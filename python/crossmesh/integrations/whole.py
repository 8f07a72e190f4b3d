"""Whole tensors from trainers that make them one by one to workers that load them, for frameworks whose contract is that.

Every trainer rank has every tensor for a moment, so each publishes a part of its rows: no rank sends the model alone. A worker learns from
the roll call what is published, receives all of a version beside the model, and hands it on once it is whole and its digests hold.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from .. import Layout, Mesh
from ..sync import Publisher, Subscriber, SyncError, offered
from ..sync.publisher import _dtype_name


class Sender:
    """A trainer rank. Rank 0 holds the roll call at ``address``."""

    def __init__(self, address: str, *, rank: int, size: int, secret: str | None = None) -> None:
        self._rank, self._size, self._version = rank, size, 0
        self._publisher = Publisher(address, rank=rank, size=size, secret=secret)
        self._rows: dict[str, slice | None] = {}

    def publish(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Publishes the next version: a snapshot of every tensor as it comes."""
        self._version += 1
        if self._rows:
            self._publisher.publish(self._version, values=((name, self._part(name, value)) for name, value in weights))
        else:
            self._publisher.offer(dict(self._first(weights)))
            self._publisher.publish(self._version)
            self._publisher.forget()

    def wait(self, patience_s: float) -> dict:
        """Until every worker has all of it; the timings."""
        self._publisher.wait(self._version, patience_s)
        return self._publisher.timings()

    def _first(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, tuple]]:
        mesh = Mesh("T", part=self._size, ranks=range(self._size))
        for name, value in weights:
            layout = Layout(_dtype_name(value), tuple(value.shape), mesh, ["part", *[None] * (value.ndim - 1)][: value.ndim])
            boxes = layout.boxes(self._rank)
            self._rows[name] = slice(*(boxes[0][0] if boxes else (0, 0))) if value.ndim else None
            yield name, (self._part(name, value).detach().clone(), layout)

    def _part(self, name: str, value: Any) -> Any:
        if name not in self._rows:
            raise SyncError(f"`{name}` was not sent the first time\nhint: the same tensors are sent every time")
        rows = self._rows[name]
        return value if rows is None else value[rows]

    def close(self) -> None:
        self._publisher.close()


class Receiver:
    """A worker. It joins when the first version is asked for: what there is to receive is known then."""

    def __init__(self, address: str, *, rank: int, size: int, secret: str | None = None) -> None:
        self._address, self._rank, self._size, self._secret = address, rank, size, secret
        self._subscriber: Subscriber | None = None

    def receive(self, patience_s: float) -> list[tuple[str, Any]]:
        """The tensors of the next version, where they arrived, in host memory: it is theirs until ``done`` is called."""
        import torch

        if self._subscriber is None:
            about = offered(self._address, secret=self._secret, timeout_s=patience_s)
            self._subscriber = Subscriber(self._address, about, rank=self._rank, size=self._size, secret=self._secret)
        if not self._subscriber.poll(patience_s):
            raise SyncError(f"no version came to worker {self._rank} within {patience_s} s")
        return [(name, torch.from_dlpack(array)) for name, array in self._subscriber.staged.items()]

    def done(self) -> None:
        """They are loaded: the next version may come."""
        self._subscriber.install()

    def close(self) -> None:
        if self._subscriber is not None:
            self._subscriber.close()


def batches(weights: list[tuple[str, Any]], most_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    """At most so many bytes at a time, or one tensor."""
    batch: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in weights:
        if batch and size + tensor.nbytes > most_bytes:
            yield batch
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield batch


def meeting_place(address: str | None) -> dict[str, Any]:
    """Where the others find this process, should it be the trainer's rank 0, and a secret that they get from it."""
    if address is None:
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        address = f"{_own_ip()}:{port}"
    return {"address": address, "secret": secrets.token_hex(32)}


def _own_ip() -> str:
    """The address by which this host reaches others; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
