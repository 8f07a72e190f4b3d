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


def test_500_random_shardings_have_jaxs_boxes():
    rng = random.Random(2)
    devices = jax.devices("cpu")
    for _ in range(500):
        sizes = rng.choice([(2,), (3,), (4,), (2, 2), (2, 3), (3, 4), (2, 2, 3), (1, 4)])
        total = int(np.prod(sizes))
        chosen = np.array(rng.sample(devices, total)).reshape(sizes)
        names = tuple(f"a{i}" for i in range(len(sizes)))
        dims = rng.randint(1, 3)
        sharding = NamedSharding(Mesh(chosen, names), random_spec(rng, names, dims))
        shape = tuple(12 * rng.randint(1, 3) for _ in range(dims))
        layout = cm.jax.layout(np.dtype("float32"), shape, sharding, "J")
        for device, index in sharding.devices_indices_map(shape).items():
            box = [s.indices(n)[:2] for s, n in zip(index, shape)]
            assert layout.boxes(device.id) == [box], f"{layout} on {device}"
        assert layout.ranks == [d.id for d in chosen.flat] and cm.Layout.parse(str(layout)) == layout


def test_unreduced_axes_are_partial_sums():
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "d"), axis_types=explicit)
    spec = PartitionSpec("x", unreduced={"d"})
    layout = cm.jax.layout("bfloat16", (8, 4), NamedSharding(mesh, spec))
    assert str(layout) == "bf16[8,4]@A{x:2,d:2}=0-3(x,_ | sum d)"


def test_other_shardings_are_refused_by_name():
    with pytest.raises(cm.LayoutError, match="SingleDeviceSharding has no counterpart"):
        cm.jax.layout("float32", (8,), SingleDeviceSharding(jax.devices("cpu")[0]))
