"""A small Llama from 4 trainers to 2 replicas of 2 servers, by JAX's own shardings: JAX cuts the weights, and JAX says what should arrive.

crossmesh launch -n 8 -- python examples/python/jax_to_tp.py
"""

import os
import zlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import crossmesh as cm

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
COLUMNS = ("o_proj", "down_proj")  # row-parallel weights, in the words of tensor parallelism

# Every process sees four devices of its own, as the four hosts of a job would see each other's: ids are ranks.
devices = np.array(jax.devices("cpu"))
trainers = Mesh(devices, ("fsdp",))
servers = Mesh(devices.reshape(2, 2), ("dp", "tp"))


def whole(name, shape):
    """The weight that everybody expects."""
    numbers = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return jax.numpy.asarray(numbers, dtype="bfloat16")


def served(name, shape):
    if len(shape) == 1:
        return PartitionSpec()
    return PartitionSpec(None, "tp") if name.split(".")[-2] in COLUMNS else PartitionSpec("tp", None)


def cut(value, sharding, device):
    """What JAX puts on a device."""
    shards = jax.device_put(value, sharding).addressable_shards
    return next(shard.data for shard in shards if shard.device.id == device)


job = cm.init()
shapes = {name: tuple(src.shape) for name, src, _ in cm.models.from_config(CONFIG).pairs("fsdp 4", "dp 2, tp 2")}
shardings = {name: (NamedSharding(trainers, PartitionSpec("fsdp")), NamedSharding(servers, served(name, shape))) for name, shape in shapes.items()}
pairs = {
    name: (cm.jax.layout("bfloat16", shapes[name], src, "T"), cm.jax.layout("bfloat16", shapes[name], dst, "I", rank_offset=4))
    for name, (src, dst) in shardings.items()
}
plan = cm.plan(pairs, cluster=job.cluster)
mine = {}
if job.rank < 4:
    mine = {name: cut(whole(name, shape), shardings[name][0], job.rank) for name, shape in shapes.items()}
out = job.run(plan, mine, timeout_s=60)
for name, array in out.items():
    expected = cut(whole(name, shapes[name]), shardings[name][1], job.rank - 4)
    got = jax.numpy.from_dlpack(array)
    assert got.dtype == expected.dtype and np.array_equal(np.asarray(got).view(np.uint16), np.asarray(expected).view(np.uint16)), name
print(f"rank {job.rank}: {len(mine)} shards given, {len(out)} got, bit for bit what JAX cuts")
job.close()
