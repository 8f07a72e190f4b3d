"""Who is here, what moves next, and whether it counts: decided in one place, the process of the trainer's rank 0.

::

    hello    a member came: side, rank, size, boxes of tensors           -> everybody of both jobs is here: an epoch
    epoch    members in order are the ranks of an engine's job; all plan the same
    round    every publisher has the same newest version, every subscriber installed the last -> it moves
    check    what publishers sent, as digests by box; subscribers compare
    commit   all of them hold it: it may be installed                    (nobody installs before everybody has it all)

A member that is gone, or whose transfer failed, ends the epoch: those who are left form the next one, and the version moves again. All state
that matters is with the members (which version is staged, which is installed), and comes with their hello: a new roll call knows it too.
"""

from __future__ import annotations

import difflib
import logging
import os
import queue
import re
import secrets
import socket
import threading
import time

from .. import Cluster, CrossmeshError, Plan, plan
from .channel import Channel, Forged, derive

logger = logging.getLogger("crossmesh")
SILENT_S = 3.0
BEAT_S = 0.5
SETTLE_S = 0.2
_TRIES = 3


class MapError(CrossmeshError):
    """A tensor that only one side knows, or whose shape or dtype differs between the two."""


class Member:
    def __init__(self, channel: Channel, hello: dict) -> None:
        self.channel, self.hello = channel, hello
        self.side, self.rank, self.size = hello["side"], hello["rank"], hello["size"]
        self.host = hello["host"]
        self.key = (self.side != "publisher", self.rank)
        self.joined = -1  # the epoch that it is in
        self.version, self.changed, self.since = hello.get("version"), None, None  # what a publisher has
        self.staged, self.installed = hello.get("staged"), hello.get("installed")  # what a subscriber has
        self.told = hello.get("ready")  # the last commit
        self.wants = False  # to publish the next version, though this one has not moved

    @property
    def name(self) -> str:
        return f"{self.side} {self.rank}"

    def tell(self, word: str, **values) -> None:
        try:
            self.channel.send(word, **values)
        except OSError:
            pass  # whoever reads from it hears of it


class RollCall:
    """Listens at the address until it is closed."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._secret, self._events, self._closed = secret, queue.Queue(), False
        self._listener = socket.create_server(address, backlog=256, reuse_port=False)
        self._members: dict[tuple, Member] = {}
        self._epoch, self._round, self._tries = -1, 0, 0
        self._order: list[Member] = []  # of the epoch
        self._changed_s: float | None = None  # when the members changed
        self._why, self._looked_at = "", None
        self._complete = False  # everybody was here once
        self._moving: dict | None = None  # the round under way
        self._said = None
        self._observers: list[Channel] = []  # who want to know what is offered
        for work in (self._accept, self._decide):
            threading.Thread(target=work, name="crossmesh-roll-call", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self._events.put(("closed", None, None))

    # -- connections

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._listen, args=(stream,), daemon=True).start()

    def _listen(self, stream: socket.socket) -> None:
        member, who = None, "somebody who has not said who it is"
        try:
            channel = Channel(stream, self._secret, "roll call")
            hello = channel.receive(SILENT_S)
            if hello["side"] == "observer":
                self._events.put(("asks", channel, None))
                return
            member = Member(channel, hello)
            who = member.name
            self._events.put(("hello", member, None))
            while True:
                self._events.put(("said", member, channel.receive(SILENT_S)))
        except OSError as error:
            if isinstance(error, Forged):
                logger.warning("%s at the roll call: %s", who, error)
            stream.close()
        except Exception as error:
            logger.error("%s at the roll call says what nobody understands: %r", who, error)
            stream.close()
        if member is not None:
            self._events.put(("gone", member, None))

    # -- decisions, in one thread

    def _decide(self) -> None:
        while not self._closed:
            try:
                event, member, said = self._events.get(timeout=SETTLE_S / 2)
            except queue.Empty:
                event, member, said = None, None, None
            try:
                self._hear(event, member, said)
                self._advance()
            except Exception as error:
                # Whatever it is, this is the one thread that decides: without it everybody would wait for ever.
                what = said["word"] if event == "said" else event or "nothing new"
                why = f"the roll call failed at `{what}`{f' of {member.name}' if isinstance(member, Member) else ''}: {type(error).__name__}: {error}"
                logger.error("%s", why, exc_info=error)
                self._tries = _TRIES
                self._tell_all("error", kind="sync", text=why)
        for channel in [member.channel for member in self._members.values()] + self._observers:
            channel.close()

    def _hear(self, event: str | None, member, said: dict | None) -> None:
        if event == "hello":
            self._came(member)
        elif event == "asks":
            self._observers.append(member)
        elif event == "gone" and self._members.get(member.key) is member:
            del self._members[member.key]
            self._over(f"{member.name} is gone")
        elif event == "said" and self._members.get(member.key) is member:
            getattr(self, "_on_" + said["word"], lambda *_: None)(member, said)

    def _came(self, member: Member) -> None:
        before = self._members.get(member.key)
        if before is not None:
            before.channel.close()
        self._members[member.key] = member
        self._over(f"{member.name} came", expected=True)

    def _over(self, why: str, expected: bool = False) -> None:
        """The epoch is over; the next one waits until no more news come. ``expected``: it is nobody's fault."""
        self._changed_s, self._why, self._looked_at = time.monotonic(), why, None
        if self._moving is not None:
            self._void(self._moving, why, expected)

    def _void(self, moving: dict, why: str, expected: bool = False) -> None:
        """What was under way does not count, and what it was staged into is no version any more."""
        self._moving = None
        for member in self._order:
            if member.side == "subscriber":
                member.staged = None
                member.tell("void", version=moving["version"], why=why, expected=expected)
            else:
                member.tell("over", version=moving["version"], moved=False, why=why, expected=expected)

    def _on_joined(self, member: Member, said: dict) -> None:
        member.joined = said["epoch"]

    def _on_failed(self, member: Member, said: dict) -> None:
        if said["epoch"] != self._epoch:
            return
        self._over(f"{member.name}: {said['why']}", said.get("expected", False))
        if said.get("broken"):
            # It would fail of the same again: this version is left, and everybody hears why.
            self._tries = _TRIES
            self._tell_all("error", kind="sync", text=f"{member.name} failed at {said['why']}")

    def _on_published(self, member: Member, said: dict) -> None:
        member.version, member.changed, member.since = said["version"], said["changed"], said["since"]
        member.wants, self._tries = False, 0

    def _on_wants(self, member: Member, said: dict) -> None:
        member.wants = True

    def _on_moved(self, member: Member, said: dict) -> None:
        if self._moving is None or said["round"] != self._moving["round"]:
            return
        self._moving["moved"].add(member.key)
        self._moving["digests"] |= said.get("digests", {})
        if len(self._moving["moved"]) == len(self._order):
            for other in self._order:
                if other.side == "subscriber":
                    other.tell("check", round=said["round"], digests=self._moving["digests"])
                else:
                    other.tell("over", version=self._moving["version"], moved=True)

    def _on_checked(self, member: Member, said: dict) -> None:
        moving = self._moving
        if moving is None or said["round"] != moving["round"]:
            return
        if said["wrong"]:
            self._tries += 1
            self._void(moving, said["wrong"])
            if self._tries >= _TRIES:
                self._tell_all("error", kind="sync", text=f"version {moving['version']}: {said['wrong']}")
            return
        moving["checked"].add(member.key)
        subscribers = [m for m in self._order if m.side == "subscriber"]
        if len(moving["checked"]) == len(subscribers):
            self._moving = None
            self._commit(moving["version"], subscribers)
            for other in self._order:
                if other.side == "publisher":
                    other.tell("committed", version=moving["version"])

    def _on_installed(self, member: Member, said: dict) -> None:
        member.installed = said["version"]

    def _tell_all(self, word: str, **values) -> None:
        said = (word, values)
        if said != self._said:
            self._said = said
            for member in self._members.values():
                member.tell(word, **values)

    def _tell_observers(self) -> None:
        """What is offered, once all publishers are here."""
        publishers = [m for m in self._members.values() if m.side == "publisher"]
        if not publishers or len(publishers) < publishers[0].size:
            return
        offered = {}
        for member in publishers:
            offered |= {name: {k: t[k] for k in ("dtype", "shape")} for name, t in member.hello["tensors"].items()}
        for channel in self._observers:
            try:
                channel.send("offered", tensors=offered)
            except OSError:
                pass  # it has lost interest
        self._observers = []

    def _advance(self) -> None:
        if self._observers:
            self._tell_observers()
        if self._changed_s is not None:
            if time.monotonic() - self._changed_s >= SETTLE_S and self._is_complete():
                self._form()
        elif self._moving is None and all(m.joined == self._epoch for m in self._order):
            self._begin()
        if self._moving is None:
            self._release()

    def _release(self) -> None:
        """Lets publishers overwrite a version that will not move: nobody is there for it, another rank is past it, or all of them are.

        Who is ahead of the others waits for them, so that they have a version in common however differently they run.
        """
        publishers = [m for m in self._members.values() if m.side == "publisher"]
        newest = max((m.version for m in publishers if m.version is not None), default=None)
        nobody = self._changed_s is not None or all(m.wants for m in publishers)
        for member in publishers:
            if member.wants and (nobody or member.version is None or member.version < newest):
                member.wants = False
                member.tell("go")

    def _is_complete(self) -> bool:
        sides = {side: [m for m in self._members.values() if m.side == side] for side in ("publisher", "subscriber")}
        self._complete |= all(ms and len(ms) >= ms[0].size for ms in sides.values())
        return self._complete and all(sides.values())

    def _form(self) -> None:
        """An epoch of all who are here. Ranks of its job lie host by host; the first one is in this process."""
        members = host_by_host([self._members[key] for key in sorted(self._members)])
        if members == self._looked_at:
            return
        self._looked_at = members
        wrong = mismatch(members)
        if wrong:
            self._tell_all("error", kind="map", text=wrong)
            return
        missing = uncovered(members)
        if members[0].key != (False, 0) or missing:
            self._tell_all("waits", text=f"{self._why}; {missing or 'publisher 0 is not here'}")
            return
        self._changed_s, self._order, self._said, self._looked_at = None, members, None, None
        self._epoch = max(self._epoch, *(m.hello.get("epoch", -1) for m in members)) + 1
        nonce = secrets.token_hex(16)
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        roster = roster_of(members)
        for at, member in enumerate(members):
            member.tell("epoch", epoch=self._epoch, at=at, roster=roster, port=port, nonce=nonce, why=self._why)

    def _begin(self) -> None:
        publishers = [m for m in self._order if m.side == "publisher"]
        subscribers = [m for m in self._order if m.side == "subscriber"]
        versions = {m.version for m in publishers}
        # A version that somebody installed is installed by all: everybody had all of it.
        held = {m.staged for m in subscribers}
        if len(held) == 1 and None not in held:
            self._commit(held.pop(), subscribers)
        self._settle(subscribers)
        if len(versions) != 1 or None in versions or self._tries >= _TRIES:
            return
        version = versions.pop()
        waits = any(m.installed != m.staged for m in subscribers if m.staged is not None)
        if waits or all(m.staged == version for m in subscribers):
            return
        changed = [m.changed for m in publishers]
        partial = None not in changed and all(m.since == s.staged for m in publishers for s in subscribers)
        names = sorted(set().union(*changed)) if partial else None
        self._round += 1
        self._moving = {"round": self._round, "version": version, "moved": set(), "checked": set(), "digests": {}}
        for member in self._order:
            member.tell("round", round=self._round, epoch=self._epoch, version=version, names=names)

    def _settle(self, subscribers: list[Member]) -> None:
        """What a subscriber brought back from an epoch that ended without it: it counts if somebody installed it, and else never will."""
        for member in subscribers:
            if member.staged is None or member.staged in (member.installed, member.told):
                continue
            if any(other.installed == member.staged for other in subscribers):
                self._commit(member.staged, [member])
            else:
                member.tell("void", version=member.staged, why="the others went on without it", expected=True)
                member.staged = None

    def _commit(self, version: int, subscribers: list[Member]) -> None:
        for member in subscribers:
            member.staged = version
            if member.installed != version and member.told != version:
                member.told = version
                member.tell("commit", version=version)


def mismatch(members: list[Member]) -> str | None:
    """What the two sides see differently, with the nearest names."""
    offered = {}
    for member in members:
        if member.side == "publisher":
            offered.update({name: t for name, t in member.hello["tensors"].items()})
    wanted = set()
    for member in members:
        if member.side != "subscriber":
            continue
        for name, tensor in member.hello["tensors"].items():
            wanted.add(name)
            if name not in offered:
                near = difflib.get_close_matches(name, offered, 3, 0.5)
                hint = f"hint: the nearest are {', '.join(near)}" if near else "hint: give both sides the same names, by a map"
                return f"{member.name} wants `{name}`, which no publisher offers\n{hint}"
            for what in ("shape", "dtype"):
                if tensor[what] != offered[name][what]:
                    ours, theirs = offered[name][what], tensor[what]
                    return f"`{name}`: {what} {ours} is published, {member.name} wants {theirs}"
    return None


def roster_of(members: list[Member]) -> list[dict]:
    """Who is here with which boxes, in the order of the epoch's ranks."""
    about = lambda m: {"name": m.name, "side": m.side, "rank": m.rank, "host": m.host, "tensors": m.hello["tensors"]}  # noqa: E731
    return [about(member) for member in members]


def host_by_host(members: list[Member]) -> list[Member]:
    """Those of one host in a row, so that the planner brings nothing into a host twice; hosts in the order of their first members."""
    hosts = list(dict.fromkeys(member.host for member in members))
    return sorted(members, key=lambda member: hosts.index(member.host))


def uncovered(members: list[Member]) -> str | None:
    """What somebody wants and nobody here has, as the planner says it."""
    roster = roster_of(members)
    try:
        plan_of(roster, None)
    except CrossmeshError as error:
        return with_names(str(error).splitlines()[0], roster)
    return None


def with_names(text: str, roster: list[dict], culprit: int | None = None) -> str:
    """A sentence about ranks of an epoch, and behind it which member each of them is: nobody knows them by their place in the epoch. The culprit last."""
    ranks = [rank for rank in dict.fromkeys(map(int, re.findall(r"\br(\d+)\b", text))) if rank != culprit]
    ranks += [] if culprit is None else [culprit]
    return "; ".join([text, *(f"r{rank} is {roster[rank]['name']}" for rank in ranks if rank < len(roster))])


def plan_of(roster: list[dict], names: list[str] | None) -> Plan:
    """How these tensors go from those who offer them to those who want them; all of them without names."""
    return plan(pairs_of(roster, names), cluster=Cluster.of_ranks(member["host"] for member in roster))


def pairs_of(roster: list[dict], names: list[str] | None) -> dict[str, tuple[str, str]]:
    """For every tensor that somebody wants: who offers which boxes, and who wants which, as layouts by boxes over all members."""
    sides: dict[str, dict] = {"publisher": {}, "subscriber": {}}
    about = {}
    for at, member in enumerate(roster):
        for name, tensor in member["tensors"].items():
            if tensor["boxes"]:
                sides[member["side"]].setdefault(name, []).append((at, tensor["boxes"]))
                about[name] = f"{tensor['dtype']}[{','.join(map(str, tensor['shape']))}]"
    members, pairs = len(roster), {}
    for name, wanted in sides["subscriber"].items():
        if names is None or name in names:
            offered = sides["publisher"].get(name, [])
            pairs[name] = tuple(_layout(about[name], mesh, members, held) for mesh, held in (("P", offered), ("S", wanted)))
    return pairs


def _layout(about: str, mesh: str, members: int, held: list) -> str:
    boxes = "; ".join(f"{at}: " + " ".join(written(box) for box in boxes) for at, boxes in held)
    return f"{about}@{mesh}{{m:{members}}}=0-{members - 1}{{{boxes}}}"


def written(box: list) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in box) + "]"


def data_secret(secret: bytes, epoch: int, nonce: str) -> str:
    """The secret of an epoch's job: whoever still holds on to an earlier one is a stranger."""
    return derive(secret, f"epoch {epoch} {nonce}")


def this_rank(rank: int | None, size: int | None) -> tuple[int, int]:
    """Our place in our own job, by what is given or by the launcher's environment."""
    for names in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank is None and names[0] in os.environ:
            rank, size = int(os.environ[names[0]]), int(os.environ.get(names[1], "1"))
    return (0, 1) if rank is None else (rank, size or 1)
