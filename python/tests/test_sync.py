"""Weights that are published and installed while processes die, stop, and lie."""

import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ranks import allowed, free_port, run

import crossmesh as cm
from crossmesh.sync.channel import Channel
from crossmesh.sync.rollcall import RollCall

SCRIPT = pathlib.Path(__file__).with_name("syncing.py")
SECRET = "a secret of this very test run"
MOMENTS = int(os.environ.get("CROSSMESH_SWEEP", "1"))


class Members:
    """Two publishers and two subscribers, and what they print."""

    def __init__(self, hosts=1):
        self.port, self.processes, self.hosts = free_port(), {}, hosts
        self.lines = {}

    def start(self, side, rank, fault="none"):
        env = os.environ | {"CROSSMESH_SECRET": SECRET, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        env |= {"CROSSMESH_HOST": f"host{rank % self.hosts}"}
        command = [sys.executable, SCRIPT, side, str(rank), str(self.port), fault]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        self.processes[side, rank] = process
        self.lines[side, rank] = []
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream, side, rank, process), daemon=True).start()

    def _read(self, stream, side, rank, process):
        for line in stream:
            if self.processes.get((side, rank)) is process:
                self.lines[side, rank].append(line.strip())

    def installed(self, rank):
        lines = [line.split() for line in list(self.lines["subscriber", rank])]
        assert not any(words[0] == "WRONG" for words in lines if words), lines
        return [int(words[1]) for words in lines if words and words[0] == "installed"]

    def wait_for(self, what, timeout_s):
        end = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < end, f"not within {timeout_s} s\n" + "\n".join(f"{k}: {v[-8:]}" for k, v in self.lines.items())
            time.sleep(0.02)

    def both_reach(self, version, timeout_s):
        self.wait_for(lambda: all((self.installed(r) or [0])[-1] >= version for r in range(2)), timeout_s)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()


CASES = [(fault, side) for fault in ("kill", "stop", "corrupt", "race") for side in ("publisher", "subscriber")]


def test_survivors_hold_one_version_and_the_next_one_comes():
    """Side by side: processes wait for each other most of the time."""
    with ThreadPoolExecutor(4) as pool:
        cases = [pool.submit(survive, fault, side, moment) for moment in range(MOMENTS) for fault, side in CASES]
        took = [case.result() for case in cases]
    print(f"{len(took)} faults survived; the next version came after {statistics.median(took):.2f} s, {max(took):.2f} s at most")


def survive(fault, side, moment):
    rng = random.Random(f"{fault} {side} {moment}")
    # Of a publisher, the roll call's own process is one of two.
    who = (side, rng.randrange(2))
    # Members of both sides share a host, or hosts have one of each.
    with Members(rng.choice([1, 2])) as members:
        for at in [("publisher", 0), ("publisher", 1), ("subscriber", 0), ("subscriber", 1)]:
            members.start(*at, fault if at == who and fault in ("corrupt", "race") else "none")
        members.both_reach(1, 30)
        time.sleep(rng.uniform(0, 0.5))
        if fault == "kill":
            members.processes[who].kill()
            members.processes[who].wait()
            time.sleep(rng.uniform(0, 0.3))
            members.start(*who)
            # The five seconds begin when it is there: on a busy machine Python takes a while to come.
            members.wait_for(lambda: "here" in members.lines[who], 20)
        if fault == "stop":
            members.processes[who].send_signal(signal.SIGSTOP)
            # Shorter than it takes to be missed, or longer.
            time.sleep(rng.choice([0.3, 3.5]))
            members.processes[who].send_signal(signal.SIGCONT)
        now = max((members.installed(rank) or [0])[-1] for rank in range(2))
        start = time.monotonic()
        members.both_reach(now + 1, allowed(5))
        took = time.monotonic() - start
        # Nobody publishes any more: what is installed stays, and is the same.
        members.processes["publisher", 1].kill()
        members.wait_for(lambda: members.installed(0)[-1] == members.installed(1)[-1], allowed(5))
    return took


class Said:
    """A member that says what the test makes it say, to a roll call of this process."""

    def __init__(self, port, side, rank, size, **state):
        self.channel = Channel(socket.create_connection(("127.0.0.1", port)), SECRET.encode(), "member")
        about = {"w": {"dtype": "f32", "shape": [4], "boxes": [[(0, 4)]]}}
        self.channel.send("hello", side=side, rank=rank, size=size, epoch=-1, host="h", tensors=about, **state)

    def hears(self, *words):
        """The next of these words; others are passed over."""
        while True:
            said = self.channel.receive(10)
            if said["word"] in words:
                return said
            self.channel.send("beat")


@pytest.mark.parametrize(
    "staged, installed, hears",
    [((7, 9), (6, 9), "void"), ((9, 9), (8, 9), "commit"), ((8, 8), (7, 7), "commit"), ((8, None), (7, None), "void")],
)
def test_what_a_subscriber_brings_back_is_installed_or_given_up(staged, installed, hears):
    """It was away while the others went on; with it, the next version moves again."""
    port = free_port()
    roll_call = RollCall(("127.0.0.1", port), SECRET.encode())
    publisher = Said(port, "publisher", 0, 1, version=10)
    subscribers = [Said(port, "subscriber", rank, 2, staged=staged[rank], installed=installed[rank]) for rank in range(2)]
    for member in [publisher, *subscribers]:
        member.channel.send("joined", epoch=member.hears("epoch")["epoch"])
    said = subscribers[0].hears("void", "commit", "round")
    assert (said["word"], said["version"]) == (hears, staged[0])
    if hears == "commit":
        for member in subscribers:
            member.channel.send("installed", version=staged[0])
    for member in subscribers:
        assert member.hears("round")["version"] == 10
    roll_call.close()


def test_subsets_changes_turns_and_timings():
    port = free_port()
    script = f"""
import json
address = "127.0.0.1:{port}"
if rank == 0:
    weights = {{"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float32)}}
    pub = cm.sync.Publisher(address, rank=0, size=1)
    pub.offer(weights)
    for version in (1, 2, 3):
        weights["a"] += 1
        if version == 2:
            weights["b"] *= 5  # not published: only `a` is
        pub.publish(version, names=["a"] if version == 2 else None, changed_only=version == 3)
        pub.wait(version, 20)
    try:
        pub.publish(3)
    except cm.sync.SyncError as error:
        assert "version 3 is not above 3" in str(error)
    times = json.loads(json.dumps(pub.timings()))
    assert {{"plan_s", "snapshot_s", "wire_s", "digest_s", "bytes_sent"}} <= set(times), times
    print(times["bytes_sent"])
else:
    into = {{"a": np.zeros(6, np.float32), "b": np.zeros((2, 2), np.float32)}}
    sub = cm.sync.Subscriber(address, into, rank=0, size=1)
    for version in (1, 2, 3):
        while not sub.poll(timeout_s=1):
            pass
        assert sub.install() == version == sub.version
        assert np.array_equal(into["a"], np.arange(6) + version), (version, into)
        assert np.all(into["b"] == (1 if version < 3 else 5)), (version, into)
    assert {{"install_s", "check_s", "wire_s"}} <= set(sub.timings())
    time.sleep(0.3)
"""
    assert run(2, script)[0] == str(6 * 4 + 4 * 4)


@pytest.mark.parametrize(
    ("name", "words"),
    [("layers.0.wieght", "the nearest are layers.0.weight"), ("layers.0.weight", "shape [2, 3] is published, subscriber 0 wants [2, 2]")],
)
def test_names_on_one_side_and_shapes_that_differ_are_named(name, words):
    script = """
address, name, words = "127.0.0.1:" + os.environ["PORT"], os.environ["NAME"], os.environ["WORDS"]
if rank == 0:
    member = cm.sync.Publisher(address, rank=0, size=1)
    member.offer({"layers.0.weight": np.zeros((2, 3), np.float32)})
    wait = lambda: member.wait(1, 10)
else:
    member = cm.sync.Subscriber(address, {name: np.zeros((2, 2), np.float32)}, rank=0, size=1)
    wait = lambda: [member.poll(timeout_s=0.2) for _ in range(50)]
try:
    wait()
    raise AssertionError("no error")
except cm.sync.MapError as error:
    assert words in str(error), error
time.sleep(0.3)
"""
    run(2, script, PORT=free_port(), NAME=name, WORDS=words)


def test_members_of_a_host_are_ranks_in_a_row():
    from crossmesh.sync.rollcall import host_by_host

    class At:
        def __init__(self, host):
            self.host = host

    members = [At(host) for host in "abcabba"]
    in_order = host_by_host(members)
    assert [m.host for m in in_order] == list("aaabbbc") and in_order[0] is members[0]
    assert sorted(map(id, in_order)) == sorted(map(id, members))


def test_digests_are_of_the_elements_whatever_the_strides():
    import numpy as np
    from crossmesh._native import digests

    # BLAKE3's published digest of nothing.
    assert digests([np.zeros((0, 3))])[0].hex() == "af1349b9f5f9a1a6a0404dea36dcc949"
    rng = np.random.default_rng(1)
    for _ in range(200):
        shape = rng.integers(1, [9, 40, 300])[: rng.integers(1, 4)]
        room = rng.integers(0, 1 << 16, [2 * n + 1 for n in shape]).astype(rng.choice(["u1", "u2", "u4", "u8"]))
        view = room[tuple(slice(int(a), int(a) + int(n) * int(s), int(s)) for a, n, s in zip(rng.integers(0, 2, 3), shape, rng.integers(1, 3, 3)))]
        view = view.transpose(rng.permutation(view.ndim))
        packed = np.ascontiguousarray(view)
        other = packed.copy()
        other.flat[rng.integers(other.size)] ^= 1
        one, same, flat, differs = digests([view, packed, packed.reshape(-1).view(np.uint8), other])
        assert one == same == flat != differs, (view.shape, view.strides)


def test_a_stranger_is_turned_away():
    publisher = cm.sync.Publisher(f"127.0.0.1:{free_port()}", rank=0, size=1, secret=SECRET)
    import numpy as np

    address = "{}:{}".format(*publisher._address)
    stranger = cm.sync.Subscriber(address, {"a": np.zeros(2, np.float32)}, rank=0, size=1, secret="another secret, as long")
    with pytest.raises(cm.sync.SyncError, match="does not know the secret"):
        for _ in range(20):
            stranger.poll(timeout_s=0.5)
    stranger.close()
    publisher.close()
    with pytest.raises(cm.sync.SyncError, match="no secret"):
        cm.sync.Subscriber(address, {}, secret="short")
