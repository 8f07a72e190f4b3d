"""A member of a roll call: a thread that keeps in touch with it, and joins a job of the engine for every epoch."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Mapping

import numpy as np

from .. import CrossmeshError, _native
from .channel import Channel, SyncError, host_and_port, secret_of
from .rollcall import BEAT_S, MapError, data_secret, plan_of, this_rank, written

_ARRIVE_S = 5.0
_DEADLINE_S = 3.0


class Member:
    """What publishers and subscribers share. Subclasses say hello, bring arrays to a round, and hear how it ended."""

    side: str

    def __init__(self, address: str, rank: int | None, size: int | None, secret: str | None) -> None:
        self._address, self._secret = host_and_port(address), secret_of(secret)
        self.rank, self.size = this_rank(rank, size)
        self._lock = threading.Condition()
        self._channel: Channel | None = None
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._closed, self._error = False, None
        self._epoch, self._job, self._plans, self._roster, self._at = -1, None, {}, [], 0
        self._times: dict = {}  # of the last round
        self._version_times: dict = {}  # of what happens beside it
        self._waits_for = "not everybody has come"

    def _start(self) -> None:
        for work in (self._keep_in_touch, self._speak):
            threading.Thread(target=work, name=f"crossmesh-{self.side}", daemon=True).start()

    # -- in touch

    def _keep_in_touch(self) -> None:
        while not self._closed:
            try:
                stream = socket.create_connection(self._address, timeout=1.0)
                channel = Channel(stream, self._secret, "member")
                hello = dict(side=self.side, rank=self.rank, size=self.size, epoch=self._epoch, host=_native.host(), tensors=self._tensors())
                hello |= self._state()
                channel.send("hello", **hello)
                self._channel = channel
                while True:
                    said = channel.receive(None)
                    getattr(self, "_on_" + said["word"])(said)
            except ConnectionError as error:
                if "secret" in str(error):
                    self._fail(SyncError(f"the roll call at {self._address[0]}:{self._address[1]}: {error}"))
            except OSError:
                pass
            self._channel = None
            self._leave()
            if not self._closed:
                time.sleep(0.1)

    def _speak(self) -> None:
        """Says what there is to say, and a word now and then: the roll call takes who is silent for gone."""
        while not self._closed:
            try:
                channel, word, values = self._outbox.get(timeout=BEAT_S)
            except queue.Empty:
                channel, word, values = self._channel, "beat", {}
            try:
                if channel is not None:
                    channel.send(word, **values)
            except OSError:
                channel.close()

    def _tell(self, word: str, **values) -> None:
        """In the order of the calls, without waiting for anybody: whoever publishes goes on training."""
        self._outbox.put((self._channel, word, values))

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = error
            self._lock.notify_all()

    def _check(self) -> None:
        """Raises what the roll call found wrong."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _on_error(self, said: dict) -> None:
        self._fail((MapError if said["kind"] == "map" else SyncError)(said["text"]))

    def _on_waits(self, said: dict) -> None:
        self._waits_for = said["text"]

    # -- epochs

    def _on_epoch(self, said: dict) -> None:
        self._leave()
        self._waits_for = "it is under way"
        self._epoch, self._roster, self._at, self._plans = said["epoch"], said["roster"], said["at"], {}
        host = self._address[0]
        try:
            self._job = _native.join(
                rank=self._at,
                size=len(self._roster),
                address=f"{host}:{said['port']}",
                secret=data_secret(self._secret, self._epoch, said["nonce"]),
                arrive_s=_ARRIVE_S,
                deadline_s=_DEADLINE_S,
            )
        except CrossmeshError as error:
            self._tell("failed", epoch=self._epoch, why=str(error))
            return
        self._tell("joined", epoch=self._epoch)

    def _leave(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.abandon()

    # -- rounds

    def _on_round(self, said: dict) -> None:
        if said["epoch"] != self._epoch or self._job is None:
            return
        times = {"version": said["version"], "epoch": self._epoch}
        try:
            start = time.perf_counter()
            the_plan = self._plan(said["names"])
            times["plan_s"] = time.perf_counter() - start
            start = time.perf_counter()
            mine, out = self._arrays(said)
            handle = self._job.start(the_plan, mine, out)
            digests = self._digests(said)
            report = handle.wait()
            times |= {"wire_s": report.seconds, "bytes_sent": report.bytes_sent, "bytes_received": report.bytes_received}
            times["round_s"] = time.perf_counter() - start
        except CrossmeshError as error:
            self._tell("failed", epoch=said["epoch"], why=str(error).splitlines()[0])
            return
        with self._lock:
            self._times = times
        self._tell("moved", round=said["round"], digests=digests)

    def _plan(self, names: list[str] | None):
        """All members make the same one, of what the roll call says."""
        key = None if names is None else tuple(names)
        if key not in self._plans:
            self._plans[key] = plan_of(self._roster, names)
        return self._plans[key]

    def timings(self) -> dict:
        """The stages of the last version, in seconds, and its bytes: plain values, for JSON."""
        with self._lock:
            return json.loads(json.dumps(self._version_times | self._times))

    def close(self) -> None:
        self._closed = True
        channel = self._channel
        if channel is not None:
            channel.close()
        self._leave()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


def offered(address: str, *, secret: str | None = None, timeout_s: float = 60.0) -> dict[str, tuple[str, list[int]]]:
    """What is published at an address, once all publishers are there: dtypes and shapes by name, such as ``Subscriber`` takes."""
    where, key, end = host_and_port(address), secret_of(secret), time.monotonic() + timeout_s
    while True:
        try:
            channel = Channel(socket.create_connection(where, timeout=1.0), key, "member")
            try:
                channel.send("hello", side="observer")
                said = channel.receive(max(0.1, end - time.monotonic()))
            finally:
                channel.close()
            return {name: (tensor["dtype"], tensor["shape"]) for name, tensor in said["tensors"].items()}
        except OSError as error:
            if time.monotonic() >= end or "secret" in str(error):
                raise SyncError(f"nothing was offered at {address} within {timeout_s} s: {error}") from None
            time.sleep(0.1)


def bits(array) -> np.ndarray:
    """numpy's view of an array of ours."""
    return array.numpy()


def common(one: list, other: list) -> list | None:
    """The box that two boxes have in common."""
    box = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other)]
    return None if any(a >= b for a, b in box) else box


def offsets(boxes: list) -> list[list[int]]:
    """Where boxes begin in the array in which they lie beside each other."""
    dims = [dim for dim in range(len(boxes[0])) if any(box[dim] != boxes[0][dim] for box in boxes)] if boxes else []
    next_at, starts = 0, []
    for box in boxes:
        starts.append([next_at if dims and dim == dims[0] else 0 for dim in range(len(box))])
        next_at += box[dims[0]][1] - box[dims[0]][0] if dims else 0
    return starts


def part_of(array: np.ndarray, boxes: list, region: list) -> np.ndarray:
    """A region that lies in one of the boxes of an array."""
    for box, start in zip(boxes, offsets(boxes)):
        if common(box, region) == [tuple(span) for span in region]:
            cut = [slice(o + r[0] - b[0], o + r[1] - b[0]) for o, r, b in zip(start, region, box)]
            return array[(*cut, ...)]
    raise SyncError(f"{region} is in none of {boxes}")


def digests_of(parts: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Of the bits of arrays, by name."""
    return {name: found.hex() for name, found in zip(parts, _native.digests(list(parts.values())))}


def region_key(name: str, region: list) -> str:
    return name + written(region)
