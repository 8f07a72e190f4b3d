"""Models against what was published, and against transformers' own idea of their tensors where it is installed."""

import json
import subprocess
import sys

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


def test_a_table_of_shapes_is_a_model(tmp_path):
    known = cm.models.llama3("8B")
    shapes = dict(known.tensors(fused=True))
    model = cm.models.from_shapes(shapes, dtype="bfloat16", name="mine")
    assert (model.name, model.parameters, model.tensors()) == ("mine", known.parameters, known.tensors(fused=True))
    assert model.pairs("fsdp 8", "dp 2, tp 4") == known.pairs("fsdp 8", "dp 2, tp 4", fused=True)
    roles = {"mix": "column 8+8", "experts.out": "experts row"}
    odd = {"h.0.mix.weight": (16, 8), "h.0.experts.out": (4, 8, 6), "h.1.gain": ()}
    plan = cm.models.model_plan(cm.models.from_shapes(odd, roles=roles), "ep 2, fsdp 2", "tp 2")
    assert plan.verify().startswith("every element")
    # The command reads the same from a file.
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"dtype": "bf16", "tensors": odd, "roles": roles}))
    command = [sys.executable, "-m", "crossmesh", "plan", "--model", str(path), "--src", "ep 2, fsdp 2", "--dst", "tp 2"]
    document = subprocess.run([*command, "-o", str(tmp_path / "plan.json")], timeout=60, capture_output=True, text=True)
    assert document.returncode == 0, document.stderr
    assert cm.read_plan(tmp_path / "plan.json").fingerprint == plan.fingerprint


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: cm.models.llama3("7B"), cm.LayoutError, "llama3-8b"),
        (lambda: cm.models.from_config({"model_type": "bert"}), cm.LayoutError, "config.json"),
        (lambda: cm.models.from_shapes({"a.qkv_proj.weight": (8, 8)}), cm.LayoutError, "how its 8 rows are query, key and value"),
        (lambda: cm.models.from_shapes({"w": (8,)}, roles={"w": "row"}), cm.LayoutError, "cannot be `row`"),
        (lambda: cm.models.llama3("8B").pairs("tp 3", "dp 2"), cm.PlanError, "part of a head"),
        (lambda: cm.models.llama3("8B").pairs("two", "dp 2"), cm.LayoutError, "no parallelism"),
    ],
)
def test_mistakes_are_named(make, error, says):
    with pytest.raises(error, match=says):
        make()


# What the presets were made of, under transformers' own names of classes: sizes from the models' config.json.
CONFIGS = {
    "llama3-8b": ("LlamaConfig", dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)),
    "llama3-70b": ("LlamaConfig", dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256)),
    "llama3-405b": ("LlamaConfig", dict(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8, vocab_size=128256)),
    "mixtral-8x7b": ("MixtralConfig", dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, num_local_experts=8)),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128)),
    "qwen3-235b-a22b": ("Qwen3MoeConfig", dict(hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_parameters_of_transformers_model(name):
    """Made by transformers without memory, with one layer and with two: the rest, and a layer. Parameters by number; tensors of layers without experts by name and shape."""
    torch = pytest.importorskip("torch", reason="torch is not installed: presets were not held against transformers")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: presets were not held against it")
    kind, sizes = CONFIGS[name]

    def made(layers):
        config = getattr(transformers, kind)(**(sizes | {"num_hidden_layers": layers, "tie_word_embeddings": False}))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        return {key: list(value.shape) for key, value in model.named_parameters()}

    one, two = made(1), made(2)
    count = lambda shapes: sum(torch.Size(shape).numel() for shape in shapes.values())  # noqa: E731
    model = cm.models.Model.preset(name)
    assert model.parameters == count(one) + (count(two) - count(one)) * (sizes["num_hidden_layers"] - 1)
    ours = dict(model.tensors())
    # transformers keeps the experts of a layer in two tensors of its own.
    assert {key: shape for key, shape in two.items() if ".experts." not in key and ".gate." not in key}.items() <= ours.items()
