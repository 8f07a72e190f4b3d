"""Models against what was published, and against transformers' own idea of their tensors where it is installed."""

import pytest

import crossmesh as cm

PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters(name, parameters):
    assert cm.models.Model.preset(name).parameters == parameters


def test_a_config_makes_a_model():
    config = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 99, "moe_intermediate_size": 24}
    model = cm.models.from_config(config | {"vocab_size": 100, "num_experts": 4, "tie_word_embeddings": True})
    names = dict(model.tensors(fused=True))
    assert names["model.layers.1.mlp.experts.gate_up_proj.weight"] == [4, 48, 64]
    assert "lm_head.weight" not in names
    plan = cm.models.model_plan(model, "fsdp 4", "ep 2, tp 2", fused=True)
    assert plan.verify().startswith("every element")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: cm.models.llama3("7B"), cm.LayoutError, "llama3-8b"),
        (lambda: cm.models.from_config({"model_type": "bert"}), cm.LayoutError, "config.json"),
        (lambda: cm.models.llama3("8B").pairs("tp 3", "dp 2"), cm.PlanError, "part of a head"),
        (lambda: cm.models.llama3("8B").pairs("two", "dp 2"), cm.LayoutError, "no parallelism"),
    ],
)
def test_mistakes_are_named(make, error, says):
    with pytest.raises(error, match=says):
        make()
