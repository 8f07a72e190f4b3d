"""Slots of fused parameters: every element of a rank's parameter has one source, and ranks together have all of every tensor."""

import numpy as np
import pytest

import crossmesh as cm

SMALL = dict(hidden_size=16, intermediate_size=24, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2, vocab_size=32)
MODELS = [
    SMALL,
    SMALL | {"model_type": "qwen2", "tie_word_embeddings": True},
    SMALL | {"model_type": "qwen3", "head_dim": 4},
    SMALL | {"model_type": "mixtral", "num_local_experts": 3},
    SMALL | {"model_type": "qwen3_moe", "num_experts": 3, "moe_intermediate_size": 8},
]


@pytest.mark.parametrize("config", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slots_fill_parameters_once(config, tp):
    whole = {}
    for rank in range(tp):
        filled = {}
        for name, slot in cm.maps.vllm(config, tp=tp, rank=rank).items():
            shape = slot.layout.shard_shape(rank)
            whole.setdefault(name, np.zeros(slot.layout.shape, int))
            (box,) = slot.layout.boxes(rank)
            whole[name][tuple(slice(a, b) for a, b in box)] += 1
            filled.setdefault(slot.param, []).append((slot.index, shape))
        for param, parts in filled.items():
            experts = 1 + max((index[0] for index, _ in parts if index and isinstance(index[0], int)), default=0)
            stacked = any(index and isinstance(index[0], int) for index, _ in parts)
            rows = max((index[-1].stop if index and isinstance(index[-1], slice) else shape[0]) for index, shape in parts)
            array = np.zeros(([experts] if stacked else []) + [rows] + parts[0][1][1:], int)
            for index, shape in parts:
                assert list(array[index].shape) == shape, (param, index)
                array[index] += 1
            assert (array == 1).all(), param
    for name, count in whole.items():
        assert count.min() >= 1, name
        if "k_proj" not in name and "v_proj" not in name and "norm" not in name and "gate.weight" not in name:
            assert count.max() == 1, name


def test_names_of_wrapped_modules_and_mistakes():
    assert cm.maps.hf("llama")("_orig_mod.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(cm.sync.MapError, match="no names of `gpt`"):
        cm.maps.hf("gpt")
    with pytest.raises(cm.sync.MapError, match="no `vocab_size`"):
        cm.maps.vllm({k: v for k, v in SMALL.items() if k != "vocab_size"}, tp=2, rank=0)
    with pytest.raises(cm.sync.MapError, match="not split evenly over tp 3"):
        cm.maps.vllm(SMALL, tp=3, rank=0)
