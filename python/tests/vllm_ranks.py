"""A process of test_vllm.py: ``python vllm_ranks.py worker|trainer RANK PORT FOLDER``.

A worker is vLLM's own as far as it goes without a GPU: its Qwen3-MoE, split over two workers, with its loaders and its layerwise reload, and the
methods of its worker class that a server calls. It is told what to do line by line, and holds every parameter against the same version, loaded
by vLLM from a checkpoint. A trainer rank has half of every tensor, as FSDP2 does.

Two things of vLLM are replaced, since PyPI's wheel is the one for GPUs: its platform is said to be a CPU, and the packing of experts for the kernels of
CPUs, which that wheel lacks, is a copy.
"""

import json
import os
import struct
import sys
from types import SimpleNamespace

import torch

CONFIG = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_experts=4,
    num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128, hidden_act="silu",
    max_position_embeddings=256, rms_norm_eps=1e-6, decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False, torch_dtype="bfloat16",
)  # fmt: skip
WORKERS = TRAINERS = 2
VERSIONS = (1, 2)


def shapes():
    """By name, as Hugging Face's checkpoints have them."""
    c = SimpleNamespace(**CONFIG)
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}"
        for name, shape in dict(q=(q, c.hidden_size), k=(kv, c.hidden_size), v=(kv, c.hidden_size), o=(c.hidden_size, q)).items():
            yield f"{at}.self_attn.{name}_proj.weight", shape
        for name, size in {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim, "input_layernorm": c.hidden_size}.items():
            yield f"{at}.{name}.weight", (size,)
        yield f"{at}.post_attention_layernorm.weight", (c.hidden_size,)
        yield f"{at}.mlp.gate.weight", (c.num_experts, c.hidden_size)
        for expert in range(c.num_experts):
            for name in ("gate", "up"):
                yield f"{at}.mlp.experts.{expert}.{name}_proj.weight", (c.moe_intermediate_size, c.hidden_size)
            yield f"{at}.mlp.experts.{expert}.down_proj.weight", (c.hidden_size, c.moe_intermediate_size)
    yield "model.norm.weight", (c.hidden_size,)
    yield "lm_head.weight", (c.vocab_size, c.hidden_size)


def values(version):
    numbers = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=numbers).bfloat16() for name, shape in shapes()}


def save(folder):
    """Every version as a checkpoint that vLLM reads; version 0 is what workers begin with."""
    for version in (0, *VERSIONS):
        header, at, tensors = {}, 0, values(version)
        for name, value in tensors.items():
            header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [at, at := at + value.nbytes]}
        text = json.dumps(header).encode()
        os.mkdir(f"{folder}/{version}")
        with open(f"{folder}/{version}/model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.writelines(value.view(torch.int16).numpy().tobytes() for value in tensors.values())
        with open(f"{folder}/{version}/config.json", "w") as file:
            json.dump(CONFIG, file)


def work(rank, port, folder):
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    import vllm._custom_ops
    from vllm.config import LoadConfig, ModelConfig, ParallelConfig, VllmConfig, WeightTransferConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import get_model
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.gpu_worker import Worker as Theirs

    vllm._custom_ops.cpu_prepack_moe_weight = lambda weight, isa: weight.clone()
    load_general_plugins()  # finds us by our entry point

    def load(version):
        """The model with a version from its checkpoint, by vLLM alone."""
        config = VllmConfig(
            model_config=ModelConfig(model=f"{folder}/{version}", skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True),
            parallel_config=ParallelConfig(tensor_parallel_size=WORKERS, rank=rank),
            load_config=LoadConfig(load_format="safetensors", use_tqdm_on_load=False),
            weight_transfer_config=WeightTransferConfig(backend="crossmesh"),
        )
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(WORKERS, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
                initialize_model_parallel(WORKERS, backend="gloo")
            return config, get_model(vllm_config=config)

    class Worker(Theirs):
        """Made by hand: a whole one wants a device and a cache."""

        def __init__(self, config, model):
            self.vllm_config, self.rank, self.model_runner = config, rank, SimpleNamespace(reset_lora_state=lambda: None)
            self._weight_update_active = self._weight_update_is_draft = False
            create = WeightTransferEngineFactory.create_engine
            self.weight_transfer_engine = create(config.weight_transfer_config, config, torch.device("cpu"), model)

    config, model = load(0)
    worker, mine = Worker(config, model), dict(model.named_parameters())
    is_version = lambda version: differing(mine, dict(load(version)[1].named_parameters()))  # noqa: E731
    memory = {name: value.data_ptr() for name, value in mine.items()}
    installed, announced = 0, None
    answer({"parameters": len(mine)})
    for line in sys.stdin:
        word, *given = json.loads(line)
        getattr(worker, word)(*given)
        if word == "update_weights":
            announced = given[0]["version"]
        if word == "finish_weight_update":
            installed = announced
        mine = dict(model.named_parameters())
        answer({"differs": is_version(installed), "moved": [name for name in memory if mine[name].data_ptr() != memory[name]]})
    times = worker.weight_transfer_engine._subscriber.timings()
    answer({"received": times["bytes_received"], "held": sum(value.nbytes for value in mine.values())})
    worker.weight_transfer_engine.shutdown()


def differing(mine, expected):
    """The parameters that are not bit for bit those that were expected."""
    assert list(mine) == list(expected)
    return [name for name, value in expected.items() if not torch.equal(mine[name].view(torch.int16), value.view(torch.int16))]


def answer(what):
    print("answer " + json.dumps(what), flush=True)


def train(rank, port, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.plugins import load_general_plugins

    from crossmesh.integrations.vllm import CrossmeshTrainerInitInfo

    load_general_plugins()
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=TRAINERS)
    mesh = init_device_mesh("cpu", (TRAINERS,), mesh_dim_names=("fsdp",))
    model = torch.nn.Module()
    for name, value in values(0).items():
        *path, last = name.split(".")
        at = model
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])))
    client = HTTPVLLMWeightSyncClient(os.environ["SERVER"], timeout=120)
    init = CrossmeshTrainerInitInfo(os.environ["ADDRESS"], WORKERS, rank=rank, size=TRAINERS, patience_s=120)
    trainer = WeightTransferTrainerFactory.trainer_init(init, client=client, source=ModuleSource(model))
    for version in VERSIONS:
        new = values(version)
        with torch.no_grad():
            for name, value in model.named_parameters():
                assert isinstance(value, DTensor)
                value.to_local().copy_(new[name].chunk(TRAINERS)[rank])
        trainer.send_weights()
    trainer.shutdown()
    torch.distributed.barrier()
    print("sent", flush=True)


if __name__ == "__main__":
    side, rank, port, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    (train if side == "trainer" else work)(rank, port, folder)
    os._exit(0)  # a process that ends under gloo's threads may be aborted
