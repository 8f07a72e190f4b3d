"""Layouts against torch's own index maps, and plans run by torch's own operations."""

import os
import random
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

RANKS = 8
HOSTS = cm.Cluster(hosts=4, devices=2, nic="1Gbit")
PLANS = int(os.environ.get("CROSSMESH_SWEEP", "24"))


def random_layout(rng, name, shape, ranks):
    """A layout of a tensor over some of the ranks; sources may be partial sums."""
    sizes = rng.choice([(2,), (4,), (2, 2), (3,), (2, 3), (8,), (2, 4), (2, 2, 2)])
    total = 1
    for size in sizes:
        total *= size
    axes = {f"{name.lower()}{i}": size for i, size in enumerate(sizes)}
    free, dims, partial = list(axes), [], []
    rng.shuffle(free)
    if name.startswith("A") and rng.random() < 0.4:
        partial = [free.pop()]
    for _ in shape:
        count = rng.choice([0, 0, 1, 1, 2])
        dims.append(["+".join(free.pop() for _ in range(min(count, len(free))))][0] or None)
    mesh = cm.Mesh(name, ranks=rng.sample(ranks, total), **axes)
    return cm.Layout("f32", shape, mesh, dims, partial=partial or None)


def problem(number):
    """Two tensors with layouts; whole numbers, so that sums are exact."""
    rng = random.Random(number)
    tensors = {}
    for name in ("w", "b"):
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
        # One mesh of a name in a plan.
        tensors[name] = [random_layout(rng, side + name, shape, range(RANKS)) for side in "AB"]
    generator = torch.Generator().manual_seed(number)
    parts = {
        name: torch.randint(-50, 50, (src.num_parts, *src.shape), generator=generator).float()
        for name, (src, _) in tensors.items()
    }
    return cm.plan({name: tuple(pair) for name, pair in tensors.items()}, cluster=HOSTS), tensors, parts


def shard(layout, rank, value):
    """A rank's shard, cut by slicing."""
    boxes = layout.boxes(rank) if rank in layout.ranks else []
    if not boxes:
        return None
    return value[tuple(slice(a, b) for a, b in boxes[0])].clone()


def run_plans(rank, path, failures):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    for number in range(PLANS):
        plan, tensors, parts = problem(number)
        mine = {}
        for name, (src, _) in tensors.items():
            if rank in src.ranks and src.holds(rank):
                mine[name] = shard(src, rank, parts[name][src.part(rank)])
        out = cm.torch.reshard(plan, mine)
        for name, (_, dst) in tensors.items():
            wanted = shard(dst, rank, parts[name].sum(0))
            if (wanted is None) != (name not in out) or (wanted is not None and not torch.equal(wanted, out[name])):
                failures.put(f"plan {number}, rank {rank}, {name}: {tensors[name]}")
    dist.destroy_process_group()


def test_plans_run_on_torchs_own_operations():
    context = mp.get_context("spawn")
    failures = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_plans, (os.path.join(folder, "store"), failures), nprocs=RANKS)
    assert failures.empty(), failures.get()


def disagree(rank, path, said):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    dst = "f32[8]@B{y:2}=0-1(_)" if rank == 0 else "f32[8]@B{y:2}=0-1(y)"
    plan = cm.plan(("f32[8]@A{x:2}=0-1(x)", dst))
    try:
        cm.torch.reshard(plan, {"": torch.zeros(4)})
    except cm.torch.JobError as error:
        said.put(str(error))
    try:
        cm.torch.reshard(cm.plan(("f32[8]@A{x:2}=0-1(x)", "f32[8]@B{y:2}=0-1(_)")), {"": torch.zeros(3)})
    except cm.torch.ArrayError as error:
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
