"""Layouts against torch's own index maps, and plans run by torch's own operations."""

import itertools
import math
import os
import pathlib
import random
import subprocess
import sys

import pytest
from ranks import free_port, run

import crossmesh as cm

torch = pytest.importorskip("torch", reason="torch is not installed: its layouts and its executor were not tested")
from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry  # noqa: E402
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset  # noqa: E402
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard  # noqa: E402


def coordinates(sizes):
    return list(itertools.product(*map(range, sizes)))


def torchs_elements(shape, sizes, coord, order):
    """What torch.chunk leaves of a tensor that knows where its elements were, dim by dim in the order that torch has decoded."""
    local = torch.arange(math.prod(shape)).reshape(shape)
    for dim, axes in order:
        for axis in axes:
            chunks = local.chunk(sizes[axis], dim)
            local = chunks[coord[axis]] if coord[axis] < len(chunks) else local.narrow(dim, 0, 0)
    return local


def random_placements(rng, sizes, num_dims):
    """Axes of a dim nest in any order, which is told by split factors; now and then a factor is of nothing."""
    found, orders = [], [[] for _ in range(num_dims)]
    for at in reversed(range(len(sizes))):
        kind, dim = rng.randrange(6), rng.randrange(num_dims)
        if kind < 2:
            found.append([Replicate(), Partial()][kind])
            continue
        order = orders[dim]
        behind = rng.randint(0, len(order))
        factor = math.prod(sizes[other] for other in order[:behind]) if rng.random() < 0.95 else rng.randint(2, 7)
        order.insert(behind, at)
        found.append(Shard(dim) if factor == 1 and rng.random() < 0.9 else _StridedShard(dim, split_factor=factor))
    return tuple(reversed(found))


class Sizes:
    """All that torch asks a mesh for when it decodes placements."""

    def __init__(self, sizes):
        self.size = lambda at: sizes[at]


def plain(placement):
    """A split factor of 1 is none."""
    return Shard(placement.dim) if isinstance(placement, _StridedShard) and placement.split_factor == 1 else placement


def test_500_random_layouts_have_torchs_boxes_and_go_back():
    """Against torch's index map, and against torch.chunk in the order of axes that torch decodes from the placements.

    Where strided shards are uneven the two may differ: torch goes through the axes of the mesh in the one, FSDP and ``full_tensor`` by the order in
    the other, and so do we (fsdp_modules.py has such a tensor).
    """
    rng, compared, strided, undecodable, two_meanings = random.Random(1), 0, 0, 0, 0
    while compared < 500:
        sizes = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        shape = tuple(rng.randint(0 if rng.random() < 0.1 else 1, 11) for _ in range(rng.randint(1, 3)))
        placements = random_placements(rng, sizes, len(shape))
        ranks = rng.sample(range(100), math.prod(sizes))
        axes = {f"a{i}": size for i, size in enumerate(sizes)}
        uneven = lambda length, of: length % math.prod(axes[axis] for axis in of)  # noqa: E731
        decoded = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, Sizes(sizes))
        if decoded is None:
            undecodable += 1
            with pytest.raises(cm.LayoutError, match="split factor"):
                cm.torch.layout_of(torch.float32, shape, placements, axes, "M", ranks)
            continue
        compared += 1
        layout = cm.torch.layout_of(torch.float32, shape, placements, axes, "M", ranks)
        full = torch.arange(math.prod(shape)).reshape(shape)
        for coord, rank in zip(coordinates(sizes), ranks):
            theirs = torchs_elements(shape, sizes, coord, decoded)
            boxes = layout.boxes(rank)
            assert list(theirs.shape) == layout.shard_shape(rank), f"{layout} at {coord}"
            assert len(boxes) == (theirs.numel() > 0), f"{layout} at {coord}"
            if boxes:
                assert torch.equal(full[tuple(slice(a, b) for a, b in boxes[0])], theirs), f"{layout} at {coord}"
            local, offset = _compute_local_shape_and_global_offset(shape, sizes, list(coord), placements)
            box = [(o, o + n) for o, n in zip(offset, local)]
            if boxes != ([box] if math.prod(local) else []):
                assert any(isinstance(p, _StridedShard) for p in placements) and any(map(uneven, shape, layout.chunking_axes()))
                two_meanings += 1
        strided += any(isinstance(plain(p), _StridedShard) for p in placements)
        assert cm.torch.placements(layout) == tuple(map(plain, placements)), layout
        assert cm.Layout.parse(str(layout)) == layout
    assert strided >= 40 and undecodable >= 10 and two_meanings, (strided, undecodable, two_meanings)


def test_a_shard_order_is_the_order_of_the_axes():
    """Against torch's own translation of orders into strided shards."""
    sizes, shape = (2, 3, 2), (25, 7)
    axes = {"a": 2, "b": 3, "c": 2}
    for order in itertools.permutations(range(3)):
        shard_order = (ShardOrderEntry(tensor_dim=0, mesh_dims=order),)
        placements = (Shard(0),) * 3
        layout = cm.torch.layout_of(torch.float32, shape, placements, axes, shard_order=shard_order)
        strided = DTensorSpec._convert_shard_order_to_StridedShard(shard_order, placements, Sizes(sizes))
        assert layout == cm.torch.layout_of(torch.float32, shape, strided, axes)
        assert layout.chunking_axes() == [["abc"[at] for at in order], []] and cm.torch.placements(layout) == strided


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f32[6,4]@A{tp:2}(tp of 4+2,_)", r"dim 0 is split `tp of 4\+2`: fused parts have no counterpart"),
        ("f32[8]@A{tp:2}(tp[0,3,8])", r"dim 0 is split `tp\[0,3,8\]`: cuts"),
        ("f32[8]@A{tp:2}{0: [0:4]; 1: [4:8]}", "listed boxes have no counterpart"),
    ],
)
def test_what_placements_cannot_say_is_named(text, says):
    layout = cm.Layout.parse(text)
    with pytest.raises(cm.LayoutError, match=says):
        cm.torch.placements(layout)


def test_cuts_that_chunk_are_chunks():
    assert cm.torch.placements(cm.Layout.parse("f32[8]@A{tp:2}(tp[0,4,8])")) == (Shard(0),)
    assert cm.torch.placements(cm.Layout.parse("f32[8,4]@A{dp:2,tp:2}(_,dp | max tp)")) == (Shard(1), Partial("max"))


def test_subclasses_of_partial_are_no_sums():
    """torch's own say `sum` and mean the norm of parts, or parts under a mask."""
    masked = _MaskPartial(offset_shape=torch.Size([8]))
    assert masked.reduce_op == "sum"
    with pytest.raises(cm.LayoutError, match="placement 0, .*MaskPartial.* has no counterpart"):
        cm.torch.layout_of(torch.float32, (8,), [masked], {"tp": 2})


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


def under_torchrun(script, ranks):
    script = pathlib.Path(__file__).with_name(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ran = subprocess.run([*torchrun, script], capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout


def test_plans_run_both_ways_under_torchrun():
    said = under_torchrun("both_ways.py", 8)
    assert said.count(" 0 wrong") == 8, said


def test_modules_of_fsdp_and_tensor_parallelism_hold_what_our_layouts_say():
    said = under_torchrun("fsdp_modules.py", 8)
    assert said.count(": 0 wrong of") == 8 and " 0 strided" not in said and " 0 uneven" not in said, said


GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def raises(kind, words, call):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), (words, str(error))
    else:
        raise AssertionError(words)
"""


def test_ranks_with_different_plans_move_nothing():
    run(2, GROUP + """
dst = "f32[8]@B{y:2}=0-1(_)" if rank == 0 else "f32[8]@B{y:2}=0-1(y)"
plan = cm.plan(("f32[8]@A{x:2}=0-1(x)", dst))
raises(cm.JobError, ["rank 0 has plan", "nothing was moved"], lambda: cm.torch.reshard(plan, {"": torch.zeros(4)}))
# A plan that is too large for the group, on one of them only: nobody waits for who was refused.
wide = "f32[8]@B{y:4}=0-3(y)" if rank == 1 else "f32[8]@B{y:2}=0-1(y)"
plan = cm.plan(("f32[8]@A{x:2}=0-1(x)", wide))
raises(cm.JobError, ["rank 0 has plan"], lambda: cm.torch.reshard(plan, {"": torch.zeros(4)}))
plan = cm.plan(("f32[8]@A{x:2}=0-1(x)", "f32[8]@B{y:4}=0-3(y)"))
raises(cm.JobError, ["for 4 ranks, the group has 2", "hint"], lambda: cm.torch.reshard(plan, {"": torch.zeros(4)}))
leave()
""", timeout=120)


def test_arrays_of_one_rank_that_do_not_fit_are_told_to_all():
    """gloo would let the others wait for half an hour."""
    run(3, GROUP + """
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.device_mesh import DeviceMesh
plan = cm.plan({
    "w": ("f32[8,2]@A{x:2}=0-1(x,_)", "f32[8,2]@B{y:2}=1-2(_,y)"),
    "v": ("f32[2,6]@A{x:2}=0-1(x,_)", "f32[2,6]@B{y:2}=1-2(_,y of 4+2)"),
})
full = {"w": torch.arange(16.).reshape(8, 2), "v": torch.arange(12.).reshape(2, 6)}
good = {name: value.chunk(2)[rank].clone() for name, value in full.items()} if rank < 2 else {}
alone = DeviceMesh("cpu", [[0], [1], [2]], mesh_dim_names=("r", "one"))["one"]
def told(bad, words, tensors=None, out=None):
    mine, into = (good if tensors is None else tensors, out) if rank == bad else (good, None)
    words = words if rank == bad else [f"rank {bad} cannot take part, nothing was moved", *words]
    raises(cm.ArrayError, words, lambda: cm.torch.reshard(plan, mine, into))
with_w = lambda value: good | {"w": value}
w = "tensor `w` of rank 1, source: "
told(1, [w + "missing", "hint"], {"v": torch.zeros(1, 6)})
told(1, [w + "shape [4, 2] is expected, [2, 4] was given"], with_w(torch.zeros(2, 4)))
told(1, [w + "dtype torch.float32 is expected, torch.float64 was given", "hint"], with_w(torch.zeros(4, 2, dtype=torch.float64)))
told(1, [w + "device cpu is expected, which gloo moves, meta was given"], with_w(torch.zeros(4, 2, device="meta")))
told(1, [w + "a dense torch tensor is expected, list was given"], with_w([1.0]))
told(1, [w + "a DTensor was given", "to_local"], with_w(DTensor.from_local(torch.zeros(4, 2), alone, [Replicate()])))
told(0, ["tensors of rank 0 has `z`, which the plan does not know", "`v`, `w`"], good | {"z": torch.zeros(1)})
told(0, ["tensors of rank 0: int is no dict"], 3)
o = "tensor `w` of rank 2, out: "
new = cm.torch.empty(plan, 2)
told(2, [o + "missing"], out={"v": new["v"]})
told(2, [o + "shape [8, 1] is expected, [8] was given"], out=new | {"w": torch.zeros(8)})
told(2, [o + "elements share memory"], out=new | {"w": torch.zeros(1, 1).expand(8, 1)})
# On rank 1, which gives and gets: into what it gives.
given = torch.zeros(8, 2)
into = cm.torch.empty(plan, 1) | {"w": given.reshape(-1)[4:12].reshape(8, 1)}
told(1, ["tensor `w` of rank 1", "shares memory with tensor `w` of rank 1"], with_w(given[4:]), into)
# Beside each other in one tensor they may be.
both = torch.zeros(8, 4)
into = cm.torch.empty(plan, 1) | {"w": both[:, 2:3]} if rank == 1 else None
mine = with_w(both[4:, :2].copy_(good["w"])) if rank == 1 else good
for _ in range(2):
    out = cm.torch.reshard(plan, mine, into)
    if rank:
        at = rank - 1
        assert torch.equal(out["w"], full["w"][:, at:at + 1]) and torch.equal(out["v"], full["v"][:, [[0, 1, 4], [2, 3, 5]][at]]), out
leave()
""", timeout=120)


def test_rows_that_a_layout_places_itself():
    """Gaps and strides of a layout: one row of memory, the same by both ways."""
    run(2, GROUP + """
dst = "f32[4,6]@B{y:2}=0-1{0: [0:4, 0:3] at 1 by 6,1; 1: [0:4, 3:6] by 1,4}"
plan = cm.plan({"w": ("f32[4,6]@A{x:2}=0-1(x,_)", dst)})
full = torch.arange(24.).reshape(4, 6)
mine = {"w": full[2 * rank:2 * rank + 2].clone()}
raises(cm.LayoutError, ["no one array", "shard_elements"], lambda: cm.Layout.parse(dst).shard_shape(rank))
by_torch = cm.torch.reshard(plan, mine, {"w": torch.zeros(22 if rank == 0 else 12)})["w"]
with cm.init(rank=rank, size=2, address=os.environ["JOB"]) as job:
    by_engine = torch.zeros(22 if rank == 0 else 12)
    job.run(plan, mine, {"w": by_engine}, timeout_s=20)
    made = job.run(plan, mine, timeout_s=20)["w"]
    assert list(made.shape) == list(cm.torch.empty(plan, rank)["w"].shape) == list(by_torch.shape)
assert torch.equal(by_torch, by_engine)
seen = by_torch[1:].as_strided((4, 3), (6, 1)) if rank == 0 else by_torch.as_strided((4, 3), (1, 4))
assert torch.equal(seen, full[:, 3 * rank:3 * rank + 3]), by_torch
leave()
""", timeout=120, JOB=f"127.0.0.1:{free_port()}")
