"""What torch, transformers and Megatron-core say of our checkpoints, and we of theirs.

CI has none of the large ones: ``pip install torch transformers megatron-core==0.16.1 psutil`` and this file. Each test says what it misses.
"""

import pathlib
import pickle
import subprocess
import sys
import textwrap
import zipfile

import pytest

import crossmesh as cm

torch = pytest.importorskip("torch", reason="torch is not installed: its checkpoints were not tested")
import torch.distributed.checkpoint as dcp  # noqa: E402

TINY = dict(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    intermediate_size=48,
    vocab_size=64,
    max_position_embeddings=32,
    tie_word_embeddings=False,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1, mlp_only_layers=[])


def nested():
    torch.manual_seed(0)
    return {
        "a": torch.randn(7, 4),
        "b": {"c": torch.randn(5).bfloat16(), "s": torch.tensor(2.5), "n": 3},
        "e": torch.zeros(0, 3),
        "t": torch.arange(6).view(2, 3).t(),
        "f8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    }


def flat(values, prefix=""):
    found = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def blank(values):
    if isinstance(values, dict):
        return {key: blank(value) for key, value in values.items()}
    return torch.zeros_like(values) if isinstance(values, torch.Tensor) else 0


def same(one, two):
    assert one.keys() == two.keys()
    for name, value in one.items():
        if not isinstance(value, torch.Tensor):
            assert two[name] == value
            continue
        assert value.dtype == two[name].dtype and value.shape == two[name].shape, name
        assert value.contiguous().view(torch.uint8).equal(two[name].contiguous().view(torch.uint8)) if value.dim() else value == two[name], name


@pytest.fixture
def of_torch(tmp_path):
    dcp.save(nested(), checkpoint_id=tmp_path / "torch")
    return tmp_path


@pytest.mark.filterwarnings("ignore")
def test_torchs_dcp_and_ours(of_torch):
    ck = cm.checkpoint.open(of_torch / "torch")
    assert ck.format == "dcp" and ck.objects == ["b.n"] and not cm.checkpoint.check(ck)
    into = {name: value for name, value in flat(blank(nested())).items() if name != "b.n"}
    cm.checkpoint.load(ck, into=into)
    same({name: value for name, value in flat(nested()).items() if name != "b.n"}, into)
    cm.checkpoint.convert(ck, of_torch / "ours", to="dcp", ranks=3)
    into = blank(nested())
    dcp.load(into, checkpoint_id=of_torch / "ours")
    same(flat(nested()), flat(into))
    # Nested names come back as they were.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(of_torch / "ours", of_torch / "one.pt")
    same(flat(nested()), flat(torch.load(of_torch / "one.pt")))
    # Every item is a zip file with right checksums.
    metadata = pickle.loads((of_torch / "ours" / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        bytes_ = (of_torch / "ours" / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        import io

        assert zipfile.ZipFile(io.BytesIO(bytes_)).testzip() is None


@pytest.mark.filterwarnings("ignore")
def test_torchs_hf_storage_and_ours(tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed: torch's HF storage was not tested")
    from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

    # Its writer takes contiguous tensors only.
    values = {name: value.contiguous() for name, value in flat(nested()).items() if name not in ("b.n", "f8")}
    dcp.save(values, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "torch"), save_distributed=True))
    ck = cm.checkpoint.open(tmp_path / "torch")
    assert ck.format == "dcp-hf"
    assert [p.kind for p in cm.checkpoint.check(ck)] == ["shape-unknown"]
    cm.checkpoint.convert(ck, tmp_path / "ours", to="dcp-hf", ranks=3)
    assert not cm.checkpoint.check(tmp_path / "ours")
    into = blank(values)
    dcp.load(into, storage_reader=HuggingFaceStorageReader(str(tmp_path / "ours")))
    same(values, into)
    # Without the last file torch has a smaller tensor, and says nothing. We do.
    (tmp_path / "ours" / "shard-00003-model-00001-of-00001.safetensors").unlink()
    assert any(p.kind == "hole" and "`a` [7, 4]" in p.what for p in cm.checkpoint.check(tmp_path / "ours"))


def model(kind, folder):
    """A tiny model of transformers, saved; and its logits."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: its models were not tested")
    torch.manual_seed(1)
    if kind == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    elif kind == "gpt2":
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, n_positions=32))
    elif kind == "mixtral":
        made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2))
    elif kind == "qwen3":
        made = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY))
    else:
        made = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TINY, **MOE))
    made.save_pretrained(folder)
    return logits(made)


def logits(made):
    with torch.no_grad():
        return made.eval()(torch.arange(20).view(2, 10)).logits


def reloaded(folder):
    import transformers

    return logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "mixtral", "gpt2"])
def test_any_parallelism_and_back_bit_for_bit(kind, tmp_path):
    expected = model(kind, tmp_path / "hf")
    cm.checkpoint.convert(tmp_path / "hf", tmp_path / "dcp", to="dcp", ranks=3)
    values = {name: torch.zeros(shape) for name, (_, shape) in cm.checkpoint.open(tmp_path / "hf").tensors.items()}
    from_ours = {name: value.clone() for name, value in values.items()}
    cm.checkpoint.load(tmp_path / "hf", into=values)
    dcp.load(from_ours, checkpoint_id=tmp_path / "dcp")
    same(values, from_ours)
    cm.checkpoint.convert(tmp_path / "dcp", tmp_path / "a", to="torch_dist", tp=2, pp=2, ep=2)
    cm.checkpoint.convert(tmp_path / "a", tmp_path / "b", to="torch_dist", tp=4, pp=1)
    cm.checkpoint.convert(tmp_path / "b", tmp_path / "back", to="hf")
    assert not cm.checkpoint.diff(tmp_path / "a", tmp_path / "b")
    assert not cm.checkpoint.diff(tmp_path / "hf", tmp_path / "back")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (tmp_path / "back" / "model.safetensors").read_bytes()
    assert reloaded(tmp_path / "back").equal(expected)


MEGATRON = '''
import json, os, sys, warnings
import torch
warnings.simplefilter("ignore")
# Its savers ask for a device that is not there.
torch.cuda.synchronize = lambda *a, **k: None
torch.cuda.current_device = lambda *a, **k: "cpu"

def main():
    config, source, target, tp, pp, ep = json.load(open(sys.argv[1])), *sys.argv[2:4], *map(int, sys.argv[4:7])
    import torch.distributed as dist
    dist.init_process_group("gloo")
    from megatron.core import parallel_state, dist_checkpointing
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    moe = config["model_type"] == "qwen3_moe"
    norms = config["model_type"].startswith("qwen3")
    experts = config.get("num_experts") or config.get("num_local_experts")
    sizes = dict(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"], num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"], kv_channels=config["head_dim"], ffn_hidden_size=config["intermediate_size"],
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, normalization="RMSNorm",
        use_cpu_initialization=True, qk_layernorm=norms, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, pipeline_dtype=torch.float32, sequence_parallel=moe and tp > 1,
    )
    if moe:
        sizes |= dict(num_moe_experts=experts, moe_ffn_hidden_size=config["moe_intermediate_size"], moe_router_topk=2, expert_tensor_parallel_size=1)
    spec = get_gpt_layer_local_spec(num_experts=experts if moe else None, moe_grouped_gemm=False, qk_layernorm=norms, normalization="RMSNorm")
    model = GPTModel(
        TransformerConfig(**sizes), spec, vocab_size=config["vocab_size"], max_sequence_length=32, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    # States of modules beside their weights are Megatron's own: a checkpoint from elsewhere has none.
    wanted = {name: value for name, value in model.sharded_state_dict().items() if not name.endswith("_extra_state")}
    loaded = dist_checkpointing.load(wanted, source)
    model.load_state_dict(loaded, strict=False)
    assert not any(parameter.isnan().any() for parameter in model.parameters()), "every parameter was loaded"
    if dist.get_rank() == 0:
        os.makedirs(target)
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), target)

if __name__ == "__main__":
    main()
'''


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind, cut", [("llama", (1, 1, 1)), ("qwen3_moe", (1, 1, 1)), ("llama", (2, 2, 1)), ("qwen3_moe", (1, 2, 2))])
def test_megatron_reads_ours_and_we_what_it_writes(kind, cut, tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: its checkpoints were not tested")
    from ranks import free_port

    expected = model(kind, tmp_path / "hf")
    cm.checkpoint.convert(tmp_path / "hf", tmp_path / "ours", to="torch_dist", tp=2, pp=2, ep=2, spelling="local")
    script = tmp_path / "megatron_job.py"
    script.write_text(textwrap.dedent(MEGATRON))
    world, port, jobs = cut[0] * cut[1] * cut[2], str(free_port()), []
    for rank in range(world):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, script, tmp_path / "hf" / "config.json", tmp_path / "ours", tmp_path / "megatron", *map(str, cut)]
        import os

        jobs.append(subprocess.Popen(words, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for job in jobs:
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output[-4000:]
    # Through Megatron's hands, every bit: read by its loader, written by its saver, on other ranks.
    made = cm.checkpoint.open(tmp_path / "megatron")
    assert made.format == "torch_dist" and not cm.checkpoint.check(made)
    cm.checkpoint.convert(made, tmp_path / "back", to="hf", config=tmp_path / "hf" / "config.json")
    (tmp_path / "back" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    assert not cm.checkpoint.diff(tmp_path / "hf", tmp_path / "back")
    assert reloaded(tmp_path / "back").equal(expected)


def test_only_a_ranks_boxes_are_read(tmp_path):
    """FSDP's DTensors, two ranks: each reads its half."""
    torch.manual_seed(0)
    dcp.save({"w": torch.randn(64, 32)}, checkpoint_id=tmp_path / "torch")
    script = tmp_path / "half.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, torch, torch.distributed as dist, crossmesh as cm
            from torch.distributed.tensor import DTensor, Shard, init_device_mesh
            if __name__ == "__main__":
                dist.init_process_group("gloo")
                mesh = init_device_mesh("cpu", (2,))
                local = torch.zeros(32, 32)
                value = DTensor.from_local(local, mesh, [Shard(0)])
                report = cm.checkpoint.load(sys.argv[1], into={"w": value})
                assert report["bytes_read"] == 32 * 32 * 4, report
                torch.manual_seed(0)
                assert value.full_tensor().equal(torch.randn(64, 32))
            """
        )
    )
    from ranks import free_port

    port, jobs = str(free_port()), []
    import os

    for rank in range(2):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
        jobs.append(subprocess.Popen([sys.executable, script, tmp_path / "torch"], env=os.environ | env))
    assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    assert pathlib.Path(script).exists()
