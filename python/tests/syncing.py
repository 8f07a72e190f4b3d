"""A member of a weight sync, as a process of a test: ``python syncing.py publisher|subscriber RANK PORT FAULT``.

Two publishers split rows, two subscribers split fused columns; values follow from name and version, so anybody knows what a version is.
"""

import os
import sys
import time

import numpy as np

import crossmesh as cm
import crossmesh.sync.publisher

SHAPES = {"q": (64, 32), "k": (16, 32), "v": (16, 32), "o": (32, 64), "norm": (32,)}
SIZE = 2
SPLIT = {"q": ("fsdp", None), "k": ("fsdp", None), "v": ("fsdp", None), "o": ("fsdp", None), "norm": (None,)}


def value(name, version):
    seed = [list(SHAPES).index(name), version]
    return np.random.default_rng(seed).standard_normal(SHAPES[name]).astype(np.float32)


def as_bf16(array):
    raw = array.view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def cut(layout, rank, array):
    parts = [array[tuple(slice(a, b) for a, b in box)] for box in layout.boxes(rank)]
    return parts[0]


def publish(rank, port, fault):
    mesh = cm.Mesh("T", fsdp=SIZE, ranks=range(SIZE))
    layouts = {name: cm.Layout("f32", SHAPES[name], mesh, SPLIT[name]) for name in SHAPES}
    shards = {name: np.empty(layouts[name].shard_shape(rank), np.float32) for name in SHAPES}
    publisher = cm.sync.Publisher(f"127.0.0.1:{port}", dtype="bf16", rank=rank, size=SIZE)
    publisher.offer({name: (shards[name], layouts[name]) for name in SHAPES})
    if fault == "corrupt":
        corrupt_digest()
    version, step = 0, float(os.environ["STEP_S"])
    while True:
        # A version is what the time says, the same on all ranks, as a step of training would be.
        version = max(version + 1, int(time.time() / step))
        time.sleep(max(0.0, version * step - time.time()))
        if fault == "race":
            time.sleep(np.random.default_rng().uniform(0, step))
        for name, shard in shards.items():
            shard[...] = cut(layouts[name], rank, value(name, version))
        publisher.publish(version)
        print("published", version, flush=True)


def corrupt_digest():
    """Once, a digest is not that of what was published."""
    right, left = cm.sync.publisher.digests_of, [2]

    def wrong(parts):
        left[0] -= 1
        found = right(parts)
        return found | {name: "0" * 32 for name in list(found)[:1]} if left[0] == 0 else found

    cm.sync.publisher.digests_of = wrong


def subscribe(rank, port, fault):
    mesh = cm.Mesh("I", tp=SIZE, ranks=range(SIZE))
    lay = lambda name, *dims: cm.Layout("bf16", SHAPES[name], mesh, dims)  # noqa: E731
    rows = {name: SHAPES[name][0] // SIZE for name in "qkv"}
    into = {"qkv": np.zeros((sum(rows.values()), 32), np.uint16), "o": np.zeros((32, 32), np.uint16), "norm": np.zeros(32, np.uint16)}
    slots, at = {}, 0
    for name in "qkv":
        slots[name] = cm.sync.Slot("qkv", lay(name, "tp", None), (slice(at, at + rows[name]),))
        at += rows[name]
    slots |= {"o": lay("o", None, "tp"), "norm": lay("norm", None)}
    subscriber = Corrupts if fault == "corrupt" else cm.sync.Subscriber
    subscriber = subscriber(f"127.0.0.1:{port}", into, slots, dtype="bf16", rank=rank, size=SIZE)

    def wanted(version):
        cuts = {name: cut(lay(name, "tp", None), rank, as_bf16(value(name, version))) for name in "qkv"}
        return {
            "qkv": np.concatenate([cuts[name] for name in "qkv"]),
            "o": cut(lay("o", None, "tp"), rank, as_bf16(value("o", version))),
            "norm": as_bf16(value("norm", version)),
        }

    while True:
        if subscriber.poll(timeout_s=0.05):
            version = subscriber.install()
            right = all(np.array_equal(into[name], array) for name, array in wanted(version).items())
            print("installed" if right else "WRONG", version, time.time(), flush=True)


class Corrupts(cm.sync.Subscriber):
    left = 3

    def _on_check(self, said):
        self.left -= 1
        if self.left == 0:
            self._slots["k"][0, 0] ^= 1
        super()._on_check(said)


if __name__ == "__main__":
    os.environ.setdefault("STEP_S", "0.25")
    side, rank, port, fault = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    print("here", flush=True)
    (publish if side == "publisher" else subscribe)(rank, port, fault)
