"""A member of a roll call: a thread that keeps in touch with it, and joins a job of the engine for every epoch."""

from __future__ import annotations

import json
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import CrossmeshError, _native
from .channel import Channel, Forged, SyncError, WrongSecret, host_and_port, secret_of
from .rollcall import BEAT_S, SETTLE_S, MapError, data_secret, plan_of, this_rank, with_names, written

_ARRIVE_S = 5.0
_DEADLINE_S = 3.0
logger = logging.getLogger("crossmesh")


@dataclass
class _Joining:
    """An epoch whose job is being joined, in a thread of its own: whoever does not come is waited for there."""

    epoch: int
    came: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)


@dataclass
class _Round:
    """A version under way."""

    said: dict
    handle: _native.Handle
    digests: dict
    times: dict
    start_s: float
    # When the roll call gave it up, and what it said of it.
    void: tuple[float, dict] | None = None


class Member:
    """What publishers and subscribers share. Subclasses say hello, bring arrays to a round, and hear how it ended.

    One thread listens: to the roll call, to whether a job was joined, and to whether a transfer has ended, whatever comes first. So what the roll
    call says of an epoch that is over is heard while its job still waits for the dead.
    """

    side: str

    def __init__(self, address: str, rank: int | None, size: int | None, secret: str | None) -> None:
        self._address, self._secret = host_and_port(address), secret_of(secret)
        self.rank, self.size = this_rank(rank, size)
        self._lock = threading.Condition()
        self._channel: Channel | None = None
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._closed, self._error = False, None
        self._epoch, self._job, self._plans, self._roster, self._at = -1, None, {}, [], 0
        self._joining: _Joining | None = None
        self._moving: _Round | None = None
        self._leaving: list[threading.Thread] = []  # which end jobs that were left
        self._bell, self._rings = socket.socketpair()  # that a job was joined
        self._times: dict = {}  # of the last round
        self._version_times: dict = {}  # of what happens beside it
        self._waits_for = "not everybody has come"

    def _start(self) -> None:
        for work in (self._keep_in_touch, self._speak):
            threading.Thread(target=work, name=f"crossmesh-{self.side}", daemon=True).start()

    # -- in touch

    def _keep_in_touch(self) -> None:
        where = f"the roll call at {self._address[0]}:{self._address[1]}"
        while not self._closed:
            try:
                self._listen()
            except WrongSecret as error:
                self._fail(SyncError(f"{where}: {error}"))
            except Forged as error:
                logger.warning("%s: %s", where, error)
            except OSError:
                pass  # nobody is there, or not any more
            except Exception as error:
                self._broken("a word", error)
            self._channel = None
            self._leave()
            if not self._closed:
                time.sleep(0.1)

    def _listen(self) -> None:
        """To one connection, as long as it lasts."""
        with socket.create_connection(self._address, timeout=1.0) as stream:
            channel = Channel(stream, self._secret, "member")
            hello = dict(side=self.side, rank=self.rank, size=self.size, epoch=self._epoch, host=_native.host(), tensors=self._tensors())
            with self._lock:
                # All that changes before is in this word, and all that changes afterwards is told behind it.
                self._outbox.put((channel, "hello", hello | self._state()))
                self._channel = channel
            while True:
                if self._hears_a_word(channel):
                    said = channel.receive(None)
                    self._do(said["word"], lambda: getattr(self, "_on_" + said["word"])(said))
                joining = self._joining
                if joining is not None and not joining.came.empty():
                    self._do("epoch", self._joined)
                self._do("round", self._look)

    def _hears_a_word(self, channel: Channel) -> bool:
        """Waits until anything has happened; whether it was a word."""
        poll, moving, patience_ms = select.poll(), self._moving, None
        poll.register(channel, select.POLLIN)
        poll.register(self._rings, select.POLLIN)
        if moving is not None:
            poll.register(moving.handle, select.POLLIN)
            if moving.void is not None:
                patience_ms = max(0.0, 1e3 * (moving.void[0] + SETTLE_S - time.monotonic()))
        ready = {descriptor for descriptor, _ in poll.poll(patience_ms)}
        if self._rings.fileno() in ready:
            self._rings.recv(4096)
        return channel.fileno() in ready

    def _do(self, word: str, work: Callable[[], None]) -> None:
        """What nobody foresaw ends a version, and not the thread that listens: everybody would wait for ever."""
        try:
            work()
        except Exception as error:
            self._broken(f"`{word}`", error)

    def _broken(self, what: str, error: Exception) -> None:
        why = f"{what}: {type(error).__name__}: {error}"
        logger.error("%s %d failed at %s", self.side, self.rank, why, exc_info=error)
        self._moving = None
        self._fail(SyncError(f"{self.side} {self.rank} failed at {why}"))
        self._tell("failed", epoch=self._epoch, why=why, broken=True)

    def _speak(self) -> None:
        """Says what there is to say, and a word now and then: the roll call takes who is silent for gone."""
        while not self._closed:
            try:
                channel, word, values = self._outbox.get(timeout=BEAT_S)
            except queue.Empty:
                self._tell("beat")  # behind what was put there meanwhile
                continue
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
        self._joining = _Joining(self._epoch)
        options = dict(
            rank=self._at,
            size=len(self._roster),
            address=f"{self._address[0]}:{said['port']}",
            secret=data_secret(self._secret, self._epoch, said["nonce"]),
            arrive_s=_ARRIVE_S,
            deadline_s=_DEADLINE_S,
        )
        threading.Thread(target=self._join, args=(self._joining, options), name="crossmesh-joins", daemon=True).start()

    def _join(self, joining: _Joining, options: dict) -> None:
        try:
            joined: Any = _native.join(**options)
        except Exception as error:
            joined = error
        joining.came.put(joined)
        if self._joining is joining:
            self._bell.send(b"j")
        elif not isinstance(joined, Exception):
            joined.abandon()  # the epoch was over before it began

    def _joined(self) -> None:
        joining, self._joining = self._joining, None
        if joining is None:
            return  # `close` was quicker
        joined = joining.came.get()
        if isinstance(joined, CrossmeshError):
            self._tell("failed", epoch=joining.epoch, why=self._blame(joined))
        elif isinstance(joined, Exception):
            raise joined
        else:
            self._job = joined
            self._tell("joined", epoch=joining.epoch)

    def _leave(self) -> None:
        """Lets go of the epoch's job, and of what moves. Its threads may be at our memory for a moment: `_at_rest` waits for them."""
        self._moving = None
        joining, self._joining = self._joining, None
        job, self._job = self._job, None
        if joining is not None and not joining.came.empty():
            late = joining.came.get()
            job = None if isinstance(late, Exception) else late
        if job is not None:
            thread = threading.Thread(target=job.abandon, kwargs={"wait": True}, name="crossmesh-leaves", daemon=True)
            self._leaving = [*(other for other in self._leaving if other.is_alive()), thread]
            thread.start()

    def _at_rest(self) -> None:
        """Waits until no job that was left reads or writes our memory."""
        for thread in self._leaving:
            thread.join()

    # -- rounds

    def _on_round(self, said: dict) -> None:
        if said["epoch"] != self._epoch or self._job is None:
            return
        times = {"version": said["version"], "epoch": self._epoch}
        try:
            start = time.perf_counter()
            the_plan = self._plan(said["names"])
            times["plan_s"] = time.perf_counter() - start
            self._at_rest()
            start = time.perf_counter()
            mine, out = self._arrays(said)
            handle = self._job.start(the_plan, mine, out)
            self._moving = _Round(said, handle, self._digests(said), times, start)
        except CrossmeshError as error:
            self._failed(said, error)

    def _look(self) -> None:
        """Whether what moves has ended. What the roll call gave up is given up here too, after a moment in which the engine may say whose fault it was."""
        moving, report = self._moving, None
        if moving is None:
            return
        given_up = moving.void is not None
        try:
            if moving.handle.test():
                report = moving.handle.wait()
            elif not given_up:
                return
            elif time.monotonic() < moving.void[0] + SETTLE_S:
                return
            else:
                said = moving.void[1]
                self._log(said["version"], said["why"], said["expected"])
        except CrossmeshError as error:
            self._failed(moving.said, error, told=not given_up)
        if given_up:
            self._leave()
        elif report is not None:
            self._moved(moving, report)

    def _moved(self, moving: _Round, report: _native.Report) -> None:
        self._moving = None
        times = {"wire_s": report.seconds, "bytes_sent": report.bytes_sent, "bytes_received": report.bytes_received}
        with self._lock:
            self._times = moving.times | times | {"round_s": time.perf_counter() - moving.start_s}
        self._tell("moved", round=moving.said["round"], digests=moving.digests)

    def _give_up(self, said: dict) -> bool:
        """The roll call says that what moves will not count, for its epoch is over. Whether anything moves."""
        if self._moving is not None:
            self._moving.void = (time.monotonic(), said)
        return self._moving is not None

    def _failed(self, said: dict, error: CrossmeshError, told: bool = True) -> None:
        """A version did not come through. The roll call is told, unless it knows."""
        self._moving = None
        # That a version is not wanted any more, or not yet, is nobody's fault.
        why, expected = self._blame(error), self._closed or isinstance(error, SyncError)
        self._log(said["version"], why, expected)
        if told:
            self._tell("failed", epoch=said["epoch"], why=why, expected=expected)

    def _log(self, version: int, why: str, expected: bool) -> None:
        logger.log(logging.INFO if expected else logging.WARNING, "version %s did not come through: %s", version, why)

    def _blame(self, error: Exception) -> str:
        """What the engine says, with the names that its ranks have in their own jobs; the culprit last."""
        return with_names(str(error).splitlines()[0], self._roster, getattr(error, "culprit", None))

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
            if time.monotonic() >= end or isinstance(error, WrongSecret):
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
