"""A member of a weight sync, as a process of a test: ``python syncing.py publisher|subscriber RANK ADDRESS FAULT FOLDER``.

Two publishers split rows, two subscribers split fused columns; values follow from name and version, so anybody knows what a version is. A publisher
saves its shards before it publishes them, a subscriber writes what it serves with when a line of its input asks for it.
"""

import os
import queue
import sys
import threading
import time

import numpy as np

import crossmesh as cm
import crossmesh.sync.publisher

# 10 MB a version as bf16: long enough under way to be hit there.
SHAPES = {"q": (1024, 2048), "k": (256, 2048), "v": (256, 2048), "o": (2048, 1024), "norm": (2048,)}
SIZE = 2
SPLIT = {"q": ("fsdp", None), "k": ("fsdp", None), "v": ("fsdp", None), "o": ("fsdp", None), "norm": (None,)}
STEP_S = float(os.environ.get("STEP_S", "1.0"))
NUMBERS = {name: np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(2654435761) for name, shape in SHAPES.items()}


def value(name, version):
    """Finite numbers of every size, whose bits differ everywhere: bf16 rounds them up and down."""
    raw = NUMBERS[name] + np.uint32((40503 * version + 7919 * list(SHAPES).index(name)) % 2**32)
    return (raw & 0xBFFFFFFF).view(np.float32).reshape(SHAPES[name])


def as_bf16(array):
    raw = array.view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def cut(layout, rank, array):
    parts = [array[tuple(slice(a, b) for a, b in box)] for box in layout.boxes(rank)]
    return parts[0]


def publish(rank, address, fault, folder):
    mesh = cm.Mesh("T", fsdp=SIZE, ranks=range(SIZE))
    layouts = {name: cm.Layout("f32", SHAPES[name], mesh, SPLIT[name]) for name in SHAPES}
    shards = {name: np.empty(layouts[name].shard_shape(rank), np.float32) for name in SHAPES}
    publisher = cm.sync.Publisher(address, dtype="bf16", rank=rank, size=SIZE)
    publisher.offer({name: (shards[name], layouts[name]) for name in SHAPES})
    if fault == "lie":
        lie_once()
    version = 0
    while True:
        # A version is what the time says, the same on all ranks, as a step of training would be.
        version = max(version + 1, int(time.time() / STEP_S))
        time.sleep(max(0.0, version * STEP_S - time.time()))
        if fault == "race":
            # Another version than the other rank has, or the same one much later.
            time.sleep(np.random.default_rng().uniform(0, 1.5 * STEP_S))
        for name, shard in shards.items():
            shard[...] = cut(layouts[name], rank, value(name, version))
        save(folder, f"{version}-{rank}", shards)
        publisher.publish(version)
        print("published", version, flush=True)


def save(folder, name, arrays):
    """Whole or not at all."""
    with open(f"{folder}/{name}.part", "wb") as file:
        np.savez(file, **arrays)
    os.rename(f"{folder}/{name}.part", f"{folder}/{name}.npz")


def lie_once():
    """Once, a digest is not that of what was published."""
    right, left = cm.sync.publisher.digests_of, [2]

    def wrong(parts):
        left[0] -= 1
        found = right(parts)
        return found | {name: "0" * 32 for name in list(found)[:1]} if left[0] == 0 else found

    cm.sync.publisher.digests_of = wrong


def subscribe(rank, address, fault, folder):
    mesh = cm.Mesh("I", tp=SIZE, ranks=range(SIZE))

    def lay(name, *axes):
        return cm.Layout("bf16", SHAPES[name], mesh, axes)

    rows = {name: SHAPES[name][0] // SIZE for name in "qkv"}
    into = {
        "qkv": np.zeros((sum(rows.values()), SHAPES["q"][1]), np.uint16),
        "o": np.zeros((SHAPES["o"][0], SHAPES["o"][1] // SIZE), np.uint16),
        "norm": np.zeros(SHAPES["norm"], np.uint16),
    }
    slots, at = {}, 0
    for name in "qkv":
        slots[name] = cm.sync.Slot("qkv", lay(name, "tp", None), (slice(at, at + rows[name]),))
        at += rows[name]
    slots |= {"o": lay("o", None, "tp"), "norm": lay("norm", None)}
    subscriber = Flips if fault == "lie" else cm.sync.Subscriber
    subscriber = subscriber(address, into, slots, dtype="bf16", rank=rank, size=SIZE)

    def wanted(version):
        cuts = {name: cut(lay(name, "tp", None), rank, as_bf16(value(name, version))) for name in "qkv"}
        return {
            "qkv": np.concatenate([cuts[name] for name in "qkv"]),
            "o": cut(lay("o", None, "tp"), rank, as_bf16(value("o", version))),
            "norm": as_bf16(value("norm", version)),
        }

    asked = questions()
    while True:
        if subscriber.poll(timeout_s=0.05):
            if fault == "race":
                # The next version is published before this one is installed.
                time.sleep(np.random.default_rng().uniform(0, 1.5 * STEP_S))
            version = subscriber.install()
            right = all(np.array_equal(into[name], array) for name, array in wanted(version).items())
            print("installed" if right else "WRONG", version, flush=True)
        while not asked.empty():
            name = asked.get()
            save(folder, name, into)
            print("wrote", name, subscriber.version or 0, flush=True)


def questions():
    """Lines of the input, as they come."""
    asked = queue.SimpleQueue()
    threading.Thread(target=lambda: [asked.put(line.strip()) for line in sys.stdin], daemon=True).start()
    return asked


class Flips(cm.sync.Subscriber):
    """Once, a bit of what arrived is another before it is looked at."""

    left = 3

    def _on_check(self, said):
        self.left -= 1
        if self.left == 0:
            self._slots["k"][0, 0] ^= 1
        super()._on_check(said)


if __name__ == "__main__":
    side, rank, address, fault, folder = sys.argv[1], int(sys.argv[2]), *sys.argv[3:6]
    print("here", flush=True)
    (publish if side == "publisher" else subscribe)(rank, address, fault, folder)
