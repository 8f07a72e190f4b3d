"""A step of training in torch, as its users write it: bf16 autocast, torch.compile, fused AdamW; the shapes of gpt-*.toml and llama-1b.toml.

    python3 train_beside.py 350m|1.3b|2.6b|llama
"""

import json
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

SHAPES = {  # layers, width, heads, KV heads, hidden, vocabulary, samples
    "350m": (24, 1024, 16, 16, 4096, 50304, 16),
    "1.3b": (24, 2048, 16, 16, 8192, 50304, 8),
    "2.6b": (32, 2560, 32, 32, 10240, 50304, 8),
    "llama": (16, 2048, 32, 8, 8192, 128256, 8),
}
TOKENS = 1024


class Gpt(nn.Module):
    """A block of GPT-2's."""

    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, _angles):
        b, s, width = x.shape
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(self.one(x)).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, width))
        return x + self.down(F.gelu(self.up(self.two(x)), approximate="tanh"))


class Llama(nn.Module):
    """A block of Llama's."""

    def __init__(self, width, heads, kv_heads, hidden):
        super().__init__()
        self.heads, self.kv_heads, self.columns = heads, kv_heads, width // heads
        self.one, self.two = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.columns, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x, angles):
        b, s, width = x.shape
        parts = self.qkv(self.one(x)).view(b, s, -1, self.columns).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], 1)
        y = F.scaled_dot_product_attention(turn(q, *angles), turn(k, *angles), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, width))
        gate, up = self.gate_up(self.two(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turn(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        layers, width, heads, kv_heads, hidden, vocab, _ = SHAPES[name]
        self.is_llama = name == "llama"
        self.tokens = nn.Embedding(vocab, width)
        self.places = None if self.is_llama else nn.Embedding(TOKENS, width)
        make = (lambda: Llama(width, heads, kv_heads, hidden)) if self.is_llama else (lambda: Gpt(width, heads, hidden))
        self.blocks = nn.ModuleList([make() for _ in range(layers)])
        self.norm = nn.RMSNorm(width) if self.is_llama else nn.LayerNorm(width)
        turns = torch.outer(torch.arange(TOKENS), 1e4 ** -(torch.arange(0, width // heads, 2) / (width // heads)))
        self.register_buffer("cos", turns.cos().to(torch.bfloat16))
        self.register_buffer("sin", turns.sin().to(torch.bfloat16))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids)
        if self.places is not None:
            x = x + self.places.weight
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.view(-1))


def main(name):
    torch.set_float32_matmul_precision("high")
    samples, vocab = SHAPES[name][-1], SHAPES[name][-2]
    with torch.device("cuda"):
        model = Model(name)
    update = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model)

    def step():
        ids = torch.randint(vocab, (samples, TOKENS + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(ids[:, :-1], ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        update.step()
        update.zero_grad(set_to_none=True)
        return loss

    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    compiling = time.perf_counter() - begin
    took = []
    for _ in range(14):
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated()
    row = {"model": name, "step_s": sorted(took[4:]), "peak_bytes": peak, "first_step_s": compiling}
    pathlib.Path("runs").mkdir(exist_ok=True)
    pathlib.Path(f"runs/torch-{name}.json").write_text(json.dumps(row))
    print(f"{name}: median {sorted(took[4:])[5] * 1e3:.1f} ms, peak {peak / 2**30:.2f} GiB, first step {compiling:.0f} s")


main(sys.argv[1])
