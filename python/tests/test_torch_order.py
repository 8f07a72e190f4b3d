"""Plans on torch's operations cannot get stuck: every send waits for its receive here, which is the worst that a transport may do.

Two wires: by tags, as gloo; and by order alone, as NCCL, where in addition all that two ranks have for each other goes through one stream, one after the other.
"""

import json
import random
import re
import threading
import time
import tomllib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import crossmesh as cm
import crossmesh.torch

SUITE = Path(__file__).parents[2] / "crates/cli/suites/paper.toml"
PATIENCE_S = 20


class Wire:
    """What `torch.distributed` is to an executor: ranks are threads, messages are handed over when both ends are there."""

    def __init__(self, size):
        self.size, self.here, self.lock = size, threading.local(), threading.Condition()
        self.posted, self.gathered, self.stuck = {}, [None] * size, False
        self.all_here = threading.Barrier(size)

    def get_rank(self, group=None):
        return self.here.rank

    def get_world_size(self, group=None):
        return self.size

    def get_backend(self, group=None):
        return "gloo"

    def all_gather(self, into, mine, group=None):
        self.gathered[self.here.rank] = mine.clone()
        self.all_here.wait(PATIENCE_S)
        for one, other in zip(into, self.gathered):
            one.copy_(other)
        self.all_here.wait(PATIENCE_S)

    def isend(self, data, group_dst, group, tag):
        return self._post((self.here.rank, group_dst, tag), "send", data)

    def irecv(self, data, group_src, group, tag):
        return self._post((group_src, self.here.rank, tag), "recv", data)

    def _post(self, key, side, data):
        assert data.is_contiguous()
        with self.lock:
            ends = self.posted.setdefault(key, {})
            assert side not in ends, f"two messages {key}"
            ends[side] = data
            if len(ends) == 2:
                assert ends["recv"].nbytes == ends["send"].nbytes, key
                ends["recv"].copy_(ends["send"])
                ends["over"] = True
                self.lock.notify_all()
        return Work(self, ends)


class InOrder(Wire):
    """As NCCL: no tags, and of what two ranks have posted for each other each has one row. The first of one row goes to the first of the other, or nothing goes."""

    def __init__(self, size):
        super().__init__(size)
        self.rows = {}

    def _post(self, key, side, data):
        src, dst, _ = key
        here, there = (src, dst) if side == "send" else (dst, src)
        assert data.is_contiguous()
        ends = {}
        with self.lock:
            self.rows.setdefault((here, there), []).append((side, data, ends))
            one, other = self.rows[here, there], self.rows.setdefault((there, here), [])
            while one and other:
                (side, mine, ends_here), (its_side, its, ends_there) = one.pop(0), other.pop(0)
                assert side != its_side, f"ranks {here} and {there} both {side} next: neither would go on"
                assert mine.nbytes == its.nbytes, f"ranks {here} and {there}: {mine.nbytes} B meet {its.nbytes} B"
                (its.copy_(mine) if side == "send" else mine.copy_(its))
                ends_here["over"] = ends_there["over"] = True
            self.lock.notify_all()
        return Work(self, ends)


class Work:
    def __init__(self, wire, ends):
        self.wire, self.ends = wire, ends

    def wait(self):
        with self.wire.lock:
            over = self.wire.lock.wait_for(lambda: "over" in self.ends or self.wire.stuck, PATIENCE_S)
            self.wire.stuck |= not over
            self.wire.lock.notify_all()
            assert "over" in self.ends, "stuck"


def cut(layout, rank, value):
    """A rank's shard, in the layout's own words; these have one box a rank."""
    (box,) = layout.boxes(rank)
    return value[tuple(slice(a, b) for a, b in box)].contiguous()


def run(monkeypatch, plan, value, piece_bytes, kind=Wire):
    (name, src, dst) = plan.tensors[0]
    wire, wrong = kind(plan.num_ranks), []
    monkeypatch.setattr(crossmesh.torch, "_matches_by_order", lambda _: kind is InOrder)
    monkeypatch.setattr(crossmesh.torch, "dist", wire)
    monkeypatch.setattr(crossmesh.torch, "PIECE_BYTES", piece_bytes)

    def rank_of(rank):
        wire.here.rank = rank
        try:
            out = cm.torch.reshard(plan, {name: cut(src, rank, value)} if src.holds(rank) else {})
            if dst.holds(rank) and not torch.equal(out[name], cut(dst, rank, value)):
                wrong.append(f"rank {rank} has something else")
        except Exception as error:
            wrong.append(f"rank {rank}: {error!r}")

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(plan.num_ranks)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.1, end - time.monotonic()))
    assert not wrong and not any(thread.is_alive() for thread in threads), (str(src), str(dst), wrong[:3])


WIRES = pytest.mark.parametrize("kind", [Wire, InOrder])


def planned(case, shape=None):
    """A case of the suite, small, and its tensor."""
    shape = shape or ([24, 16, 4] if case["name"].startswith("n-to-m") else [1536])
    small = lambda text: re.sub(r"\[[\d,]+\]", f"[{','.join(map(str, shape))}]", text)  # noqa: E731
    gpus = [int(n) for n in re.findall(r"gpu:(\d+)", case["src"] + case["dst"])]
    hosts = [int(n) for n in re.findall(r"host:(\d+)", case["src"] + case["dst"])]
    counts = [gpus[side] for side in (0, 1) for _ in range(hosts[side])]
    cluster = cm.Cluster.of_ranks(str(host) for host, count in enumerate(counts) for _ in range(count))
    plan = cm.plan({"w": (small(case["src"]), small(case["dst"]))}, cluster=cluster, nic="400Mbit")
    return plan, torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)


@WIRES
def test_the_papers_cases_go_through(monkeypatch, kind):
    for case in tomllib.loads(SUITE.read_text())["case"]:
        plan, value = planned(case)
        run(monkeypatch, plan, value, 64, kind)


def test_what_is_passed_on_is_cut_where_others_wait_for_all_of_it(monkeypatch):
    """Where a host's devices take turns on its NIC, what is passed on is a piece behind, and who has the next turn waits for all pieces."""
    bytes_of_a_piece = 1 << 16
    for case in tomllib.loads(SUITE.read_text())["case"]:
        if case["name"] not in ("n-to-m 7", "n-to-m 8"):
            continue
        plan, value = planned(case, [64, 64, 512])
        behind_a_piece, behind_all = 0, 0
        for rank in range(plan.num_ranks):
            ops = json.loads(plan.for_rank(rank))["ranks"][0]["ops"]
            for op, piece, _, waits in plan.posts(rank, bytes_of_a_piece):
                for other, count in waits:
                    pieces = max(1, -(-ops[other]["bytes"] // bytes_of_a_piece))
                    behind_a_piece += count < pieces and other in ops[op]["follows"]
                    if other in ops[op].get("after", []):
                        assert (piece, count) == (0, pieces)
                        behind_all += pieces > 1
        assert behind_a_piece > 100 and behind_all > 1, (case["name"], behind_a_piece, behind_all)
        run(monkeypatch, plan, value, bytes_of_a_piece)
    with pytest.raises(IndexError, match="the plan has ranks"):
        plan.posts(plan.num_ranks)


@WIRES
def test_random_plans_go_through(monkeypatch, kind):
    rng = random.Random(5)
    for _ in range(40):
        shape, axes = [rng.choice([8, 12]), rng.choice([8, 12])], ["x", "y", "x+y", "y+x", "_"]
        texts = []
        for mesh, ranks in (("A", "0-3"), ("B", "4-11")):
            sizes = "x:2,y:2" if mesh == "A" else "x:2,y:4"
            first = rng.choice(axes)
            second = rng.choice([axis for axis in axes if axis == "_" or not set(axis) & set(first) - {"+"}])
            texts.append(f"i32[{shape[0]},{shape[1]}]@{mesh}{{{sizes}}}={ranks}({first},{second})")
        plan = cm.plan({"w": tuple(texts)}, cluster=cm.Cluster(6, 2, nic="1Gbit"))
        run(monkeypatch, plan, torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape), 16, kind)


def test_a_wire_by_order_tells_an_order_that_differs(monkeypatch):
    """What the proof above rests on: ranks that post for each other in different orders do not get through."""
    plan = cm.plan({"w": ("i32[8]@A{x:2}=0-1(x)", "i32[8]@B{y:2}=1,0(y)")})
    value = torch.arange(8, dtype=torch.int32)
    run(monkeypatch, plan, value, 16, InOrder)
    post = crossmesh.torch._Run.run

    def backwards(self):
        if self.rank == 1:
            self.ops = self.ops[::-1]
        post(self)

    monkeypatch.setattr(crossmesh.torch._Run, "run", backwards)
    with pytest.raises(AssertionError, match="both .* next"):
        run(monkeypatch, plan, value, 16, InOrder)


@pytest.mark.parametrize(("backend", "is_one"), [("nccl", True), ("nccl-legacy", True), ("nccl-lazy", True), ("gloo", False), ("ncclx", False)])
def test_backends_that_are_nccl(backend, is_one):
    assert crossmesh.torch._matches_by_order(backend) == is_one
