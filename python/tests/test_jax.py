"""Layouts against JAX's own index maps."""

import os
import random

import pytest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=12"
jax = pytest.importorskip("jax", reason="jax is not installed: its layouts were not tested")
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding  # noqa: E402

import crossmesh as cm  # noqa: E402


def random_spec(rng, axes, dims):
    free = list(axes)
    rng.shuffle(free)
    entries = []
    for _ in range(rng.randint(0, dims)):
        taken = tuple(free.pop() for _ in range(min(rng.choice([0, 0, 1, 1, 2]), len(free))))
        entries.append(None if not taken else taken[0] if len(taken) == 1 and rng.random() < 0.5 else taken)
    return PartitionSpec(*entries)


def random_sharding(rng, devices):
    """A sharding and a shape, which its axes divide more often than not."""
    sizes = rng.choice([(2,), (3,), (4,), (2, 2), (2, 3), (3, 4), (2, 2, 3), (1, 4)])
    chosen = np.array(rng.sample(devices, int(np.prod(sizes)))).reshape(sizes)
    names, dims = tuple(f"a{i}" for i in range(len(sizes))), rng.randint(1, 3)
    shape = tuple(12 * rng.randint(1, 3) if rng.random() < 0.5 else rng.randint(0, 30) for _ in range(dims))
    return NamedSharding(Mesh(chosen, names), random_spec(rng, names, dims)), shape


def test_500_random_shardings_have_jaxs_boxes_and_go_back():
    """JAX has no uneven shards: it refuses the shape, and we refuse to say such a layout in its words."""
    rng, uneven, compared = random.Random(2), 0, 0
    devices = jax.devices("cpu")
    while compared < 500:
        sharding, shape = random_sharding(rng, devices)
        layout = cm.jax.layout(np.dtype("float32"), shape, sharding, "J")
        assert layout.ranks == [d.id for d in sharding.mesh.devices.flat] and cm.Layout.parse(str(layout)) == layout
        try:
            boxes = sharding.devices_indices_map(shape)
        except ValueError:
            uneven += 1
            with pytest.raises(cm.LayoutError, match="JAX has no uneven shards"):
                cm.jax.sharding(layout)
            continue
        compared += 1
        for device, index in boxes.items():
            box = [s.indices(n)[:2] for s, n in zip(index, shape)]
            assert layout.boxes(device.id) == ([box] if all(a < b for a, b in box) else []), f"{layout} on {device}"
        back = cm.jax.sharding(layout)
        assert back.mesh == sharding.mesh and back.is_equivalent_to(sharding, len(shape)), (back, sharding)
        assert cm.jax.layout(np.dtype("float32"), shape, back, "J") == layout
    assert 40 < uneven < 300, uneven


def test_layouts_go_to_a_mesh_that_is_there():
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "d"))
    layout = cm.Layout.parse("f32[8,4]@A{x:2,d:2}=0-3(_,d+x)")
    assert cm.jax.sharding(layout, mesh) == NamedSharding(mesh, PartitionSpec(None, ("d", "x")))
    assert cm.jax.sharding(cm.Layout.parse("f32[8,4]@A{x:2,d:2}=8-11(_,d+x)"), mesh, rank_offset=8).mesh == mesh
    with pytest.raises(cm.LayoutError, match="is not the mesh of"):
        cm.jax.sharding(cm.Layout.parse("f32[8,4]@A{x:2,d:2}=0,2,1,3(_,d)"), mesh)
    with pytest.raises(cm.LayoutError, match="JAX has no device 99"):
        cm.jax.sharding(cm.Layout.parse("f32[8]@A{x:1}=99(_)"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f32[6,4]@A{tp:2}(tp of 4+2,_)", "fused parts have no counterpart"),
        ("f32[8]@A{tp:2}(tp[0,3,8])", "cuts that are not torch.chunk's"),
        ("f32[8]@A{tp:2}{0: [0:4]; 1: [4:8]}", "listed boxes"),
        ("f32[8]@A{tp:2}(_ | max tp)", "combine by max have no counterpart"),
        ("f32[9,4]@A{tp:2}(tp,_)", "dim 0 is 9 long and split into 2 parts"),
    ],
)
def test_what_jax_cannot_say_is_named(text, says):
    with pytest.raises(cm.LayoutError, match=says):
        cm.jax.spec(cm.Layout.parse(text))


def test_unreduced_axes_are_partial_sums():
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "d"), axis_types=explicit)
    spec = PartitionSpec("x", unreduced={"d"})
    layout = cm.jax.layout("bfloat16", (8, 4), NamedSharding(mesh, spec))
    assert str(layout) == "bf16[8,4]@A{x:2,d:2}=0-3(x,_ | sum d)"
    assert cm.jax.sharding(layout, mesh) == NamedSharding(mesh, PartitionSpec("x", None, unreduced={"d"}))
    assert cm.jax.layout("bfloat16", (8, 4), cm.jax.sharding(layout)) == layout


def test_other_shardings_are_refused_by_name():
    with pytest.raises(cm.LayoutError, match="SingleDeviceSharding has no counterpart"):
        cm.jax.layout("float32", (8,), SingleDeviceSharding(jax.devices("cpu")[0]))
