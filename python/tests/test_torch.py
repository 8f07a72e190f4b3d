"""Layouts against torch's own index maps, and plans run by torch's own operations."""

import os
import pathlib
import random
import subprocess
import sys
import tempfile

import pytest

import crossmesh as cm

torch = pytest.importorskip("torch", reason="torch is not installed: its layouts and its executor were not tested")
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402


def torchs_box(shape, sizes, coord, placements):
    """A shard's box as torch has it."""
    local, offset = _compute_local_shape_and_global_offset(shape, sizes, list(coord), placements)
    return [(o, o + n) for o, n in zip(offset, local)]


def coordinates(sizes):
    coords = [()]
    for size in sizes:
        coords = [c + (i,) for c in coords for i in range(size)]
    return coords


def test_500_random_layouts_have_torchs_boxes():
    rng = random.Random(1)
    for _ in range(500):
        sizes = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        shape = tuple(rng.randint(0 if rng.random() < 0.1 else 1, 11) for _ in range(rng.randint(1, 3)))
        placements = [rng.choice([Replicate(), Partial(), Shard(rng.randrange(len(shape)))]) for _ in sizes]
        ranks = rng.sample(range(100), len(coordinates(sizes)))
        axes = {f"a{i}": size for i, size in enumerate(sizes)}
        layout = cm.torch.layout_of(torch.float32, shape, placements, axes, "M", ranks)
        for coord, rank in zip(coordinates(sizes), ranks):
            box = torchs_box(shape, sizes, coord, placements)
            wanted = [] if any(a == b for a, b in box) else [box]
            assert layout.boxes(rank) == wanted, f"{layout} at {coord}: torch has {box}"
        assert cm.Layout.parse(str(layout)) == layout


def test_fsdp_over_tensor_parallelism_nests_the_other_way_round():
    axes = {"dp": 2, "tp": 2}
    layout = cm.torch.layout_of(torch.bfloat16, (10, 4), [_StridedShard(0, split_factor=2), Shard(0)], axes, "T", range(4))
    assert str(layout) == "bf16[10,4]@T{dp:2,tp:2}=0-3(tp+dp,_)"
    assert [layout.boxes(r)[0][0] for r in range(4)] == [(0, 3), (5, 8), (3, 5), (8, 10)]
    with pytest.raises(cm.LayoutError, match="split factor"):
        cm.torch.layout_of(torch.float32, (10,), [_StridedShard(0, split_factor=3), Shard(0)], axes)
    with pytest.raises(cm.LayoutError, match="avg"):
        cm.torch.layout_of(torch.float32, (10,), [Partial("avg"), Replicate()], axes)


# -- running -----------------------------------------------------------------------------------------------------------------------


def test_plans_run_both_ways_under_torchrun():
    script = pathlib.Path(__file__).with_name("both_ways.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    ran = subprocess.run([*torchrun, script], capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.count(" 0 wrong") == 8, ran.stdout


def disagree(rank, path, said):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    dst = "f32[8]@B{y:2}=0-1(_)" if rank == 0 else "f32[8]@B{y:2}=0-1(y)"
    plan = cm.plan(("f32[8]@A{x:2}=0-1(x)", dst))
    try:
        cm.torch.reshard(plan, {"": torch.zeros(4)})
    except cm.JobError as error:
        said.put(str(error))
    try:
        cm.torch.reshard(cm.plan(("f32[8]@A{x:2}=0-1(x)", "f32[8]@B{y:2}=0-1(_)")), {"": torch.zeros(3)})
    except cm.ArrayError as error:
        said.put(str(error))
    dist.destroy_process_group()


def test_ranks_with_different_plans_move_nothing():
    context = mp.get_context("spawn")
    said = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(disagree, (os.path.join(folder, "store"), said), nprocs=2)
    texts = [said.get(timeout=5) for _ in range(4)]
    assert sum("nothing was moved" in text for text in texts) == 2
    assert sum("4 elements are expected, 3 were given" in text for text in texts) == 2
