"""A small Llama from 4 trainers (FSDP) to 2 replicas of 2 servers (tensor parallel, fused), bit for bit, by our engine.

crossmesh launch -n 8 -- python examples/python/fsdp_to_tp.py
"""

import zlib

import numpy as np

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


def whole(name, shape):
    """The weight that everybody expects; bf16 as its bits, since numpy does not know it."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, 1 << 16, shape, dtype=np.uint16)


def shard(layout, rank, value):
    """A rank's part: its boxes beside each other."""
    boxes = [value[tuple(slice(a, b) for a, b in box)] for box in layout.boxes(rank)]
    dim = next((d for d in range(value.ndim) if len({box[d] for box in layout.boxes(rank)}) > 1), 0)
    return np.concatenate(boxes, axis=dim)


job = cm.init()
model = cm.models.from_config(CONFIG)
plan = cm.models.model_plan(model, "fsdp 4", "dp 2, tp 2", fused=True, cluster=job.cluster)
mine = {
    name: shard(src, job.rank, whole(name, src.shape)) for name, src, _ in plan.tensors if job.rank in src.ranks and src.holds(job.rank)
}
handle = job.start(plan, mine)
report = handle.wait(timeout_s=60)
for name, _, dst in plan.tensors:
    if name in handle.out:
        assert np.array_equal(handle.out[name].numpy(), shard(dst, job.rank, whole(name, dst.shape))), name
print(f"rank {job.rank}: {len(mine)} shards given, {len(handle.out)} got, bit for bit, in {report.seconds * 1e3:.1f} ms")
job.close()
