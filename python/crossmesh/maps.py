"""How names of one system are those of another, for weight sync.

Hugging Face's files have ``q_proj``, ``k_proj`` and ``v_proj``; servers fuse them into one parameter, split over ranks part by part. ``vllm``
says for every published tensor which of its rows a rank wants, and where they go in its fused parameter; nothing is gathered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from . import Layout, Mesh
from .sync import MapError, Slot

_FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")


def hf(family: str) -> Callable[[str], str]:
    """From the names of a training module to those of Hugging Face's files: wrappers that compile, shard or checkpoint put words into them.

    >>> hf("llama")("_orig_mod.model.layers.0._fsdp_wrapped_module.self_attn.q_proj.weight")
    'model.layers.0.self_attn.q_proj.weight'
    """
    if family not in _FAMILIES:
        raise MapError(f"no names of `{family}` are known\nhint: one of {', '.join(_FAMILIES)}")
    inserted = re.compile(r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)(?=\.|$)")
    return lambda name: inserted.sub("", name).removeprefix(".")


def vllm(config: Any, *, tp: int, rank: int, dtype: str = "bf16", ranks: range | None = None) -> dict[str, Slot]:
    """Where every tensor of a model goes on one rank of a vLLM worker group, by Hugging Face's names.

    ``config`` is the model's ``config.json``, as a mapping or an object. q, k and v, and gate and up, lie behind each other in fused
    parameters; rows of attention and of the MLP's first layer, and columns of ``o_proj`` and ``down_proj``, are split over ``tp`` ranks; experts
    are stacked. Where there are fewer heads of k and v than ranks, several ranks have the same.

    >>> small = dict(hidden_size=8, intermediate_size=6, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, vocab_size=16)
    >>> slot = vllm(small, tp=2, rank=1)["model.layers.0.self_attn.k_proj.weight"]
    >>> slot.param, slot.index, slot.layout.boxes(1)
    ('model.layers.0.self_attn.qkv_proj.weight', (slice(4, 6, None),), [[(2, 4), (0, 8)]])
    """
    return _Vllm(config, tp, rank, dtype, ranks or range(tp)).slots()


class _Vllm:
    def __init__(self, config: Any, tp: int, rank: int, dtype: str, ranks: range) -> None:
        self._config = config if isinstance(config, Mapping) else vars(config)
        self._tp, self._rank, self._dtype, self._ranks = tp, rank, dtype, list(ranks)
        self.hidden, self.layers = self._of("hidden_size"), self._of("num_hidden_layers")
        self.heads = self._of("num_attention_heads")
        self.kv_heads = self._config.get("num_key_value_heads") or self.heads
        self.head = self._config.get("head_dim") or self.hidden // self.heads
        self.experts = self._config.get("num_local_experts") or self._config.get("num_experts") or 0
        self._made: dict[str, Slot] = {}
        for what, count in (("num_attention_heads", self.heads), ("intermediate_size", self._of("intermediate_size"))):
            if count % tp:
                raise MapError(f"{what} {count} is not split evenly over tp {tp}")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise MapError(f"num_key_value_heads {self.kv_heads} is neither split evenly over tp {tp} nor shared evenly")

    def _of(self, key: str) -> int:
        if not isinstance(self._config.get(key), int):
            raise MapError(f"the config has no `{key}`")
        return self._config[key]

    def _layout(self, shape: tuple, dim: int | None, parts: int | None = None) -> Layout:
        """Split over all ranks, or over so many parts that neighbours share."""
        parts = self._tp if parts is None else parts
        mesh = Mesh("I", tp=parts, same=self._tp // parts, ranks=self._ranks)
        return Layout(self._dtype, shape, mesh, ["tp" if at == dim else None for at in range(len(shape))])

    def _put(self, name: str, param: str, shape: tuple, dim: int | None, index: tuple = (), parts: int | None = None) -> None:
        self._made[name] = Slot(param, self._layout(shape, dim, parts), index)

    def slots(self) -> dict[str, Slot]:
        hidden, vocab = self.hidden, self._of("vocab_size")
        self._put("model.embed_tokens.weight", "model.embed_tokens.weight", (vocab, hidden), 0)
        for layer in range(self.layers):
            self._layer(f"model.layers.{layer}.")
        self._put("model.norm.weight", "model.norm.weight", (hidden,), None)
        if not self._config.get("tie_word_embeddings", False):
            self._put("lm_head.weight", "lm_head.weight", (vocab, hidden), 0)
        return self._made

    def _layer(self, at: str) -> None:
        hidden, family = self.hidden, str(self._config.get("model_type", ""))
        bias = bool(self._config.get("attention_bias", family == "qwen2"))
        kv_parts, row = min(self._tp, self.kv_heads), 0
        for part, heads, parts in (("q", self.heads, self._tp), ("k", self.kv_heads, kv_parts), ("v", self.kv_heads, kv_parts)):
            rows = heads * self.head
            mine = slice(row, row + rows // parts)
            row = mine.stop
            self._put(f"{at}self_attn.{part}_proj.weight", f"{at}self_attn.qkv_proj.weight", (rows, hidden), 0, (mine,), parts)
            if bias:
                self._put(f"{at}self_attn.{part}_proj.bias", f"{at}self_attn.qkv_proj.bias", (rows,), 0, (mine,), parts)
        self._put(f"{at}self_attn.o_proj.weight", f"{at}self_attn.o_proj.weight", (hidden, self.heads * self.head), 1)
        if family.startswith("qwen3"):
            for norm in ("q_norm", "k_norm"):
                self._put(f"{at}self_attn.{norm}.weight", f"{at}self_attn.{norm}.weight", (self.head,), None)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self._put(f"{at}{norm}.weight", f"{at}{norm}.weight", (hidden,), None)
        if self.experts:
            self._expert_layer(at, family)
        else:
            self._mlp(f"{at}mlp.", ("gate_proj", "up_proj", "down_proj"), self._of("intermediate_size"))

    def _mlp(self, at: str, names: tuple, width: int) -> None:
        mine = width // self._tp
        for place, name in enumerate(names[:2]):
            index = (slice(place * mine, (place + 1) * mine),)
            self._put(f"{at}{name}.weight", f"{at}gate_up_proj.weight", (width, self.hidden), 0, index)
        self._put(f"{at}{names[2]}.weight", f"{at}down_proj.weight", (self.hidden, width), 1)

    def _expert_layer(self, at: str, family: str) -> None:
        """Experts of a layer are one stack: ``w13_weight`` of [experts, gate and up, hidden], ``w2_weight`` of [experts, hidden, width]."""
        mixtral = family == "mixtral" or "num_local_experts" in self._config
        block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
        width = self._config.get("moe_intermediate_size") or self._of("intermediate_size")
        mine = width // self._tp
        self._put(f"{at}{block}.gate.weight", f"{at}{block}.gate.weight", (self.experts, self.hidden), None)
        for expert in range(self.experts):
            of = f"{at}{block}.experts.{expert}."
            for place, name in enumerate(names[:2]):
                index = (expert, slice(place * mine, (place + 1) * mine))
                self._put(f"{of}{name}.weight", f"{at}{block}.experts.w13_weight", (width, self.hidden), 0, index)
            self._put(f"{of}{names[2]}.weight", f"{at}{block}.experts.w2_weight", (self.hidden, width), 1, (expert,))
