#!/usr/bin/env python3
"""Regenerates tests/golden/*.json: which box of a tensor each device holds, as JAX and torch say.

    python3 -m venv .venv && .venv/bin/pip install torch jax numpy
    .venv/bin/python tests/regenerate_golden.py

The Rust test (crates/core/tests/golden_index_maps.rs) reads the files and needs neither package. Cases are drawn
with a fixed seed, so that a run with the same versions writes the same files.

A case is one line: `native` is the layout in crossmesh's notation, `foreign` (and torch's `short`) the same as the
package prints it, and `boxes` holds for each device [[start, stop] per dim], or null where the shard is empty. JAX's devices come in
the order of their ids, torch's in row-major order of the mesh.
"""

import json
import math
import os
import pathlib
import random

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset  # noqa: E402

GOLDEN = pathlib.Path(__file__).parent / "golden"
AXES = ["dp", "tp", "sp", "ep"]
MAX_DEVICES = 16


def draw_mesh(rng):
    lens = []
    for _ in range(rng.randint(1, 3)):
        lens.append(rng.choice([n for n in (1, 2, 3, 4, 5, 8) if n * math.prod(lens) <= MAX_DEVICES]))
    return lens


def mesh_text(lens, ranks=None):
    axes = ",".join(f"{name}:{n}" for name, n in zip(AXES, lens))
    return f"A{{{axes}}}" + ("" if ranks is None else "=" + ",".join(map(str, ranks)))


def layout_text(shape, mesh, dims, partial=()):
    terms = ",".join("+".join(axes) or "_" for axes in dims)
    reduced = f" | sum {'+'.join(partial)}" if partial else ""
    return f"f32[{','.join(map(str, shape))}]@{mesh}({terms}{reduced})"


def jax_case(rng):
    lens = draw_mesh(rng)
    count = math.prod(lens)
    ranks = list(range(count))
    order = rng.random()
    if order < 0.3:
        rng.shuffle(ranks)
    elif order < 0.5:
        ranks = sorted(rng.sample(range(MAX_DEVICES), count), reverse=True)
    devices = np.array([jax.devices()[r] for r in ranks]).reshape(lens)

    dims = [[] for _ in range(rng.randint(1, 3))]
    names = AXES[: len(lens)]
    rng.shuffle(names)  # so that tuples are not always in mesh order
    for name in names:
        if rng.random() < 0.8:
            rng.choice(dims).append(name)
    size = dict(zip(AXES, lens))
    shape = [math.prod(size[a] for a in axes) * rng.choice([1, 1, 2, 3, 5]) for axes in dims]

    entries = [tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in dims]
    if rng.random() < 0.5:  # what is missing at the end is None
        while entries and entries[-1] is None:
            entries.pop()
    spec = PartitionSpec(*entries)
    indices = NamedSharding(Mesh(devices, AXES[: len(lens)]), spec).devices_indices_map(tuple(shape))
    boxes = {d.id: [list(s.indices(n)[:2]) for s, n in zip(index, shape)] for d, index in indices.items()}
    listed = mesh_text(lens, ranks)
    return {
        "native": layout_text(shape, listed, dims),
        "foreign": f"f32[{','.join(map(str, shape))}]@{listed}{spec!r}",
        "boxes": [boxes[r] for r in sorted(boxes)],
    }


def torch_case(rng):
    lens = draw_mesh(rng)
    shape = [rng.choice([0, 1, 2, 3, 5, 7, 8, 10, 13, 16, 17, 31]) for _ in range(rng.randint(1, 3))]
    placements, dims, partial = [], [[] for _ in shape], []
    for name in AXES[: len(lens)]:
        kind = rng.random()
        if kind < 0.75:
            dim = rng.randrange(len(shape))
            placements.append(Shard(dim))
            dims[dim].append(name)
        elif kind < 0.85:
            placements.append(Partial("sum"))
            partial.append(name)
        else:
            placements.append(Replicate())

    boxes = []
    for coord in np.ndindex(*lens):
        size, offset = _compute_local_shape_and_global_offset(shape, lens, list(coord), placements)
        # An empty shard sits at the end of the dim for torch; where nothing is does not matter.
        boxes.append(None if 0 in size else [[o, o + n] for o, n in zip(offset, size)])
    mesh = mesh_text(lens)
    return {
        "native": layout_text(shape, mesh, dims, partial),
        "foreign": f"f32[{','.join(map(str, shape))}]@{mesh}{tuple(placements)!r}",
        "short": f"f32[{','.join(map(str, shape))}]@{mesh}{''.join(map(str, placements))}",
        "boxes": boxes,
    }


def draw(case, seed, count):
    rng = random.Random(seed)
    cases = {}
    while len(cases) < count:
        drawn = case(rng)
        cases.setdefault(drawn["native"], drawn)
    return list(cases.values())


def write(name, version, cases):
    lines = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in cases)
    head = json.dumps({"package": name, "version": version})[1:-1]
    (GOLDEN / f"index_maps_{name}.json").write_text(f'{{{head}, "cases": [\n{lines}\n]}}\n')


def main():
    GOLDEN.mkdir(exist_ok=True)
    write("jax", jax.__version__, draw(jax_case, 1, 150))
    write("torch", torch.__version__.split("+")[0], draw(torch_case, 2, 200))


if __name__ == "__main__":
    main()
