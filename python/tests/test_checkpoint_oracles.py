"""What torch, transformers and Megatron-core say of our checkpoints, and we of theirs.

``pip install torch transformers safetensors megatron-core==0.16.1 psutil``, as CI does; without one of them, tests say which they miss.
"""

import io
import json
import os
import pickle
import random
import zipfile

import pytest

import crossmesh as cm
from ranks import Ranks, run

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
        assert zipfile.ZipFile(io.BytesIO(bytes_)).testzip() is None


MEMORY = 256 << 20


def peak_bytes():
    """The most memory that this process had."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


def changed(bytes_, draw):
    """Some bytes of it otherwise, added, or gone."""
    bytes_ = bytearray(bytes_)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(bytes_))
        kind = draw.randrange(5)
        if kind == 0:
            bytes_[at] = draw.randrange(256)
        elif kind == 1:
            bytes_[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            bytes_[at : at + draw.randrange(9)] = b"\xff" * draw.randrange(9)
        elif kind == 3:
            bytes_[at:at] = bytes_[(start := draw.randrange(len(bytes_))) : start + draw.randrange(40)]
        elif at > 0 and draw.randrange(4) == 0:
            del bytes_[at:]
    return bytes(bytes_)


@pytest.mark.filterwarnings("ignore")
def test_what_torch_wrote_with_some_bytes_changed(of_torch):
    """`CROSSMESH_SWEEP` makes it long. Pickles of protocol 4, as torch writes them and we do not."""
    folder, draw, refused, used = of_torch / "torch", random.Random(16), 0, 0
    victims = {path: path.read_bytes() for path in folder.iterdir()}
    assert {path.name for path in victims} == {".metadata", "__0_0.distcp"}
    metadata = victims[folder / ".metadata"]
    # Frames, short strings, globals by the stack, and the memo.
    assert metadata[:3] == b"\x80\x04\x95" and b"\x8c" in metadata and b"\x93" in metadata and b"\x94" in metadata
    into = {name: value for name, value in flat(blank(nested())).items() if name != "b.n"}
    cm.checkpoint.load(folder, into=into)
    before, rounds = peak_bytes(), int(os.environ.get("CROSSMESH_SWEEP", 500))
    for round in range(rounds):
        path = draw.choice(sorted(victims))
        path.write_bytes(changed(victims[path], draw))
        try:
            ck = cm.checkpoint.open(folder)
            problems = cm.checkpoint.check(ck)
            if round % 4 == 0:
                cm.checkpoint.load(ck, into=into, strict=False)
            used += not problems
            refused += bool(problems)
        except cm.checkpoint.CheckpointError:
            refused += 1
        finally:
            path.write_bytes(victims[path])
    more = peak_bytes() - before
    print(f"{rounds} cases: {refused} refused, {used} usable; {more >> 20} MiB more memory")
    assert refused > rounds / 4 and more < MEMORY
    # What was changed was put back.
    cm.checkpoint.load(folder, into=into)
    same({name: value for name, value in flat(nested()).items() if name != "b.n"}, into)


def small_llama():
    """The tensors of a Llama by the names that Hugging Face has for them, as a torch module that an optimizer can step."""
    h, f, v, q, kv = TINY["hidden_size"], TINY["intermediate_size"], TINY["vocab_size"], 64, 32
    shapes = {"model.embed_tokens": (v, h), "model.norm": (h,), "lm_head": (v, h)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm": (h,), at + "post_attention_layernorm": (h,)}
        shapes |= {at + "self_attn.q_proj": (q, h), at + "self_attn.k_proj": (kv, h), at + "self_attn.v_proj": (kv, h)}
        shapes |= {at + "self_attn.o_proj": (h, q), at + "mlp.down_proj": (h, f)}
        shapes |= {at + "mlp.gate_proj": (f, h), at + "mlp.up_proj": (f, h)}
    root = torch.nn.Module()
    for name, shape in shapes.items():
        module = root
        for part in name.split("."):
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.weight = torch.nn.Parameter(torch.randn(shape))
    return root


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_of_torch_becomes_ours_and_is_torchs_again(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        sum((p * p).sum() for p in model.parameters()).backward()
        optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "torch")
    config = TINY | {"model_type": "llama", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cm.checkpoint.convert(tmp_path / "torch", tmp_path / "ours", to="crossmesh", config=tmp_path / "config.json", ranks=2)
    manifest = json.loads((tmp_path / "ours" / "manifest.json").read_text())
    assert manifest["optimizer"] == {"kind": "adamw", "moments": ["exp_avg", "exp_avg_sq"], "steps": 3}
    cm.checkpoint.convert(tmp_path / "ours", tmp_path / "megatron", to="torch_dist", tp=2, pp=2)
    wanted = {name: value.detach() for name, value in weights.items()}
    for name, of_one in states["state"].items():
        wanted |= {f"optimizer.state.{name}.{state}": value.detach() for state, value in of_one.items()}
    for source in ("ours", "megatron"):
        cm.checkpoint.convert(tmp_path / source, tmp_path / f"from-{source}", to="dcp", ranks=3)
        into = blank(wanted)
        dcp.load(into, checkpoint_id=tmp_path / f"from-{source}")
        same(wanted, into)


@pytest.mark.filterwarnings("ignore")
def test_a_training_scripts_state_dict_becomes_a_model_of_transformers(tmp_path):
    """`{"model": ..., "optim": ...}` as scripts save it: names have `model.` in front once more, and transformers has to know them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: its models were not tested")
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(1)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.arange(20).view(2, 10)).logits.square().sum().backward()
    optimizer.step()
    weights, states = get_state_dict(made, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "dcp")
    made.config.save_pretrained(tmp_path / "of-model")
    report = cm.checkpoint.convert(tmp_path / "dcp", tmp_path / "hf", to="hf", config=tmp_path / "of-model" / "config.json")
    assert report["map"] == "llama" and all(name.startswith("optim.") for name in report["left_out"])
    assert reloaded(tmp_path / "hf").equal(logits(made))


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
    smaller = {"a": torch.full((6, 4), float("nan"))}
    dcp.load(smaller, storage_reader=HuggingFaceStorageReader(str(tmp_path / "ours")))
    assert smaller["a"].equal(values["a"][:6])


def in_boxes(value, cuts):
    """A tensor's rows as one rank has them that holds them in several boxes: torch calls it a CheckpointableTensor."""
    local = value.clone()
    starts = [0, *cuts]
    local.global_shape = tuple(value.shape)
    local.global_offsets = local.local_offsets = tuple((start, 0) for start in starts)
    local.local_sizes = tuple((end - start, value.shape[1]) for start, end in zip(starts, [*cuts, value.shape[0]]))
    return local


@pytest.mark.filterwarnings("ignore")
def test_two_boxes_of_a_tensor_on_one_rank(tmp_path):
    """torch's safetensors writer keeps the last of them only, and says nothing. Its own files keep both, and so do ours."""
    pytest.importorskip("safetensors", reason="safetensors is not installed: torch's HF storage was not tested")
    from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

    value = torch.arange(24.0).view(6, 4)
    dcp.save({"w": in_boxes(value, [2])}, checkpoint_id=tmp_path / "dcp")
    assert len(cm.checkpoint.open(tmp_path / "dcp").boxes("w")) == 2
    read = torch.zeros(6, 4)
    cm.checkpoint.load(tmp_path / "dcp", into={"w": read})
    assert read.equal(value)
    dcp.save({"w": in_boxes(value, [2])}, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "hf"), save_distributed=True))
    lost = cm.checkpoint.open(tmp_path / "hf")
    assert [box[0] for box in lost.boxes("w")] == [[(2, 6), (0, 4)]]
    assert any(p.kind == "hole" and "`w` [6, 4]" in p.what and "[0:2, 0:4]" in p.what for p in cm.checkpoint.check(lost))
    with pytest.raises(cm.checkpoint.CheckpointError, match="hole"):
        cm.checkpoint.convert(lost, tmp_path / "never", to="hf")
    # Gate and up behind each other: every rank of tp has a box of each.
    values = {name: value.detach().contiguous() for name, value in small_llama().state_dict().items()}
    dcp.save(values, checkpoint_id=tmp_path / "llama")
    config = TINY | {"model_type": "llama", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cm.checkpoint.convert(tmp_path / "llama", tmp_path / "ours", to="dcp-hf", to_names="megatron", tp=2, config=tmp_path / "config.json")
    ours = cm.checkpoint.open(tmp_path / "ours")
    fused = "decoder.layers.mlp.linear_fc1.weight"
    ranks = [file.split("-model-")[0] for _, file, _, _ in ours.boxes(fused)]
    assert len(ranks) == 8 and {ranks.count(rank) for rank in ranks} == {4}, ranks
    wanted = {name: torch.zeros(shape) for name, (_, shape) in ours.tensors.items()}
    into = blank(wanted)
    cm.checkpoint.load(ours, into=wanted)
    dcp.load(into, storage_reader=HuggingFaceStorageReader(str(tmp_path / "ours")))
    same(wanted, into)
    gates = [values[f"model.layers.{i}.mlp.{part}_proj.weight"] for i in range(2) for part in ("gate", "up")]
    assert into[fused].equal(torch.cat(gates).view(2, -1, TINY["hidden_size"]))


MANY = """
import warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

folder = os.environ["FOLDER"]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
# Rows and columns that no number of ranks divides; FSDP over TP cuts the rows twice.
model = torch.nn.Sequential(torch.nn.Linear(7, 10), torch.nn.Linear(10, 5), torch.nn.LayerNorm(5))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(3, 7)).square().sum().backward()
    optimizer.step()
weights, states = get_state_dict(model, optimizer)
full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
whole = {f"d.{i}": torch.randn(5 + i, 9) for i in range(5)}
placed = [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Replicate()]]
parts = {name: distribute_tensor(value, mesh, at) for (name, value), at in zip(whole.items(), placed)}
dcp.save({"model": weights, "optim": states, "parts": parts}, checkpoint_id=f"{folder}/dcp")
dcp.save(weights | parts, storage_writer=HuggingFaceStorageWriter(f"{folder}/hf", save_distributed=True))
if rank == 0:
    torch.save({"model": full[0], "optim": full[1], "parts": whole}, f"{folder}/whole.pt")
leave()
"""


def test_what_many_processes_of_torch_saved(tmp_path):
    """FSDP over TP and DTensors of every placement, of four processes, as `.distcp` and as safetensors: read bit for bit."""
    pytest.importorskip("safetensors", reason="safetensors is not installed: torch's HF storage was not tested")
    run(4, MANY, timeout=240, FOLDER=tmp_path)
    whole = torch.load(tmp_path / "whole.pt")
    ck = cm.checkpoint.open(tmp_path / "dcp")
    assert ck.format == "dcp" and not cm.checkpoint.check(ck)
    assert len(ck.boxes("model.0.weight")) == len(ck.boxes("parts.d.0")) == 4
    wanted = {name: value for name, value in flat(whole).items() if isinstance(value, torch.Tensor)}
    assert any(name.startswith("optim.state.0.weight.exp_avg") for name in wanted)
    read = blank(wanted)
    cm.checkpoint.load(ck, into=read)
    same(wanted, read)
    # Through ours, and on other ranks, torch reads what it wrote; what is no tensor went along.
    cm.checkpoint.convert(ck, tmp_path / "again", to="dcp", ranks=3)
    assert ck.objects and ck.objects == cm.checkpoint.open(tmp_path / "again").objects
    into = blank(wanted)
    dcp.load(into, checkpoint_id=tmp_path / "again")
    same(wanted, into)
    safetensors = cm.checkpoint.open(tmp_path / "hf")
    assert safetensors.format == "dcp-hf" and [p.kind for p in cm.checkpoint.check(safetensors)] == ["shape-unknown"]
    wanted = whole["model"] | whole["parts"]
    read = blank(wanted)
    cm.checkpoint.load(safetensors, into=read)
    same(wanted, read)
    cm.checkpoint.convert(safetensors, tmp_path / "one", to="hf")
    from safetensors.torch import load_file

    same(wanted, load_file(tmp_path / "one" / "model.safetensors"))


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


def chain(kind, folder, **spelling):
    """Hugging Face to DCP, to two parallelisms of Megatron, and back: bit for bit at every stop. Returns the logits of the model."""
    expected = model(kind, folder / "hf")
    cm.checkpoint.convert(folder / "hf", folder / "dcp", to="dcp", ranks=3)
    values = {name: torch.zeros(shape) for name, (_, shape) in cm.checkpoint.open(folder / "hf").tensors.items()}
    from_ours = blank(values)
    cm.checkpoint.load(folder / "hf", into=values)
    dcp.load(from_ours, checkpoint_id=folder / "dcp")
    same(values, from_ours)
    cm.checkpoint.convert(folder / "dcp", folder / "a", to="torch_dist", tp=2, pp=2, ep=2, **spelling)
    cm.checkpoint.convert(folder / "a", folder / "b", to="torch_dist", tp=4, pp=1, **spelling)
    cm.checkpoint.convert(folder / "b", folder / "back", to="hf")
    assert not cm.checkpoint.diff(folder / "a", folder / "b")
    assert not cm.checkpoint.diff(folder / "hf", folder / "back")
    assert (folder / "hf" / "model.safetensors").read_bytes() == (folder / "back" / "model.safetensors").read_bytes()
    assert reloaded(folder / "back").equal(expected)
    return expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "gpt2"])
def test_any_parallelism_and_back_bit_for_bit(kind, tmp_path):
    chain(kind, tmp_path)


MEGATRON = """
import json, warnings
import torch
# Answers go to the test, all that others say to a file.
answers = os.fdopen(os.dup(1), "w")
log = os.open(f"{os.environ['FOLDER']}/rank-{rank}.log", os.O_CREAT | os.O_WRONLY)
os.dup2(log, 1), os.dup2(log, 2)
warnings.simplefilter("ignore")
# Its savers ask for a device that is not there.
torch.cuda.synchronize = lambda *a, **k: None
torch.cuda.current_device = lambda *a, **k: "cpu"
import torch.distributed as dist
from megatron.core import parallel_state, dist_checkpointing
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

def through(config, source, target, tp, pp, ep):
    config = json.load(open(config))
    moe = config["model_type"] == "qwen3_moe"
    norms = config["model_type"].startswith("qwen3")
    experts = config.get("num_experts") or config.get("num_local_experts")
    cut = dict(expert_tensor_parallel_size=1) if moe else {}
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, **cut)
    sizes = dict(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"], num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"], kv_channels=config["head_dim"], ffn_hidden_size=config["intermediate_size"],
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, normalization="RMSNorm",
        use_cpu_initialization=True, qk_layernorm=norms, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, pipeline_dtype=torch.float32,
    )
    if moe:
        sizes |= cut | dict(num_moe_experts=experts, moe_ffn_hidden_size=config["moe_intermediate_size"], moe_router_topk=2)
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
    if rank == 0:
        os.makedirs(target)
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), target)
    dist.barrier()
    parallel_state.destroy_model_parallel()

dist.init_process_group("gloo")
for line in sys.stdin:
    through(*json.loads(line))
    print("done", file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Megatron-core on four ranks, started once: loads a checkpoint for a parallelism, and saves it again."""
    pytest.importorskip("transformers", reason="transformers is not installed: its models were not tested")
    pytest.importorskip("psutil", reason="psutil is not installed: Megatron-core's savers want it")
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: its checkpoints were not tested")
    logs = tmp_path_factory.mktemp("megatron")
    with Ranks(4, MEGATRON, FOLDER=logs) as ranks:

        def through(*job):
            for process in ranks.processes:
                process.stdin.write(json.dumps([word if isinstance(word, int) else str(word) for word in job]) + "\n")
                process.stdin.flush()
            said = [ranks.line(rank) for rank in range(4)]
            texts = [(logs / f"rank-{rank}.log").read_text()[-2000:] for rank, word in enumerate(said) if word != "done"]
            assert not texts, "\n".join(texts)

        yield through


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_megatron_reads_every_stop_and_we_what_it_writes(kind, tmp_path, megatron):
    expected = chain(kind, tmp_path, spelling="local")
    config = tmp_path / "hf" / "config.json"
    for stop, cut in [("a", (2, 2, 2 if kind == "qwen3_moe" else 1)), ("b", (4, 1, 1))]:
        # Through Megatron's hands, every bit: read by its loader, written by its saver.
        megatron(config, tmp_path / stop, tmp_path / f"of-{stop}", *cut)
        made = cm.checkpoint.open(tmp_path / f"of-{stop}")
        assert made.format == "torch_dist" and not cm.checkpoint.check(made)
        back = tmp_path / f"back-{stop}"
        cm.checkpoint.convert(made, back, to="hf", config=config)
        assert (back / "model.safetensors").read_bytes() == (tmp_path / "hf" / "model.safetensors").read_bytes()
        assert reloaded(back).equal(expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_that_transformers_has_fused_in_memory(kind, tmp_path):
    model(kind, tmp_path / "hf")
    import transformers

    values = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    if not any(name.endswith("experts.gate_up_proj") for name in values):
        pytest.skip("this transformers has every expert on its own in memory, as it has them in files")
    dcp.save(values, checkpoint_id=tmp_path / "dcp")
    cm.checkpoint.convert(tmp_path / "dcp", tmp_path / "back", to="hf", config=tmp_path / "hf" / "config.json")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (tmp_path / "back" / "model.safetensors").read_bytes()
    # And straight into the model's memory.
    into = blank(values)
    cm.checkpoint.load(tmp_path / "hf", into=into, names=kind, to_names="fused")
    same(values, into)


HALF = """
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
value = DTensor.from_local(torch.zeros(32, 32), mesh, [Shard(0)])
report = cm.checkpoint.load(os.environ["FOLDER"], into={"w": value})
assert report["bytes_read"] == 32 * 32 * 4, report
torch.manual_seed(0)
assert value.full_tensor().equal(torch.randn(64, 32))
leave()
"""


@pytest.mark.filterwarnings("ignore")
def test_only_a_ranks_boxes_are_read(tmp_path):
    """FSDP's DTensors, two ranks: each reads its half."""
    torch.manual_seed(0)
    dcp.save({"w": torch.randn(64, 32)}, checkpoint_id=tmp_path)
    run(2, HALF, timeout=120, FOLDER=tmp_path)
