"""The same GPT step in torch eager, to be measured beside ours. Needs torch; `--llama` needs transformers.

    python3 bench/peers/torch_gpt.py [--threads 2] [--steps N | --serve] [--weights FILE] [--optimizer fused|default]
        [--llama] [--kv-heads 2] [--hidden 1376] [--dtype f32|bf16]

`--llama` is transformers' LlamaForCausalLM with SDPA; `--dtype bf16` is torch's autocast, weights and optimizer in f32.

The same sizes, tokens and, from FILE (`gpt_step --weights FILE`), weights as crates/train/examples/gpt_step.rs; the same
step: forward, backward, clipping to norm 1, AdamW with decay on matrices only.
"""

import argparse
import json
import math
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.attn(self.ln_1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.wte = nn.Embedding(args.vocab, args.width)
        self.wpe = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.ln_f = nn.LayerNorm(args.width)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() > 1:
                    weight.normal_(0, 0.02)
                elif name.endswith("bias"):
                    weight.zero_()

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Llama(nn.Module):
    """transformers' own."""

    def __init__(self, args):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=args.vocab, hidden_size=args.width, intermediate_size=args.hidden, num_hidden_layers=args.layers,
            num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, max_position_embeddings=args.context,
            rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False,
        )
        self.inner = LlamaForCausalLM(config)

    def forward(self, tokens, targets):
        logits = self.inner(input_ids=tokens).logits
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


OURS = {"attn.c_attn": "attn", "attn.c_proj": "proj", "mlp.c_fc": "up", "mlp.c_proj": "down", "ln_1": "ln_1", "ln_2": "ln_2"}


def load(model, path):
    """Weights as ours wrote them: maps are [in, out] there, [out, in] here."""
    own = dict(model.named_parameters())
    with open(path, "rb") as file, torch.no_grad():
        for name, shape in json.loads(file.readline()):
            count = math.prod(shape)
            values = torch.frombuffer(bytearray(file.read(4 * count)), dtype=torch.float32)
            layer, kind = name.rsplit(".", 1)
            if isinstance(model, Llama):
                weight = own[f"inner.{name}"]
            elif name.startswith("h."):
                _, block, rest = layer.split(".", 2)
                weight = own[f"blocks.{block}.{OURS[rest]}.{kind}"]
                values = values.view(weight.T.shape).T if weight.dim() == 2 else values
            else:
                weight = own[name]
            weight.copy_(values.view(weight.shape) if values.is_contiguous() else values)


class Trainer:
    def __init__(self, args):
        self.args, self.step_index = args, 0
        self.model = Llama(args) if args.llama else Gpt(args)
        if args.weights:
            load(self.model, args.weights)
        weights = list(self.model.parameters())
        groups = [
            {"params": [w for w in weights if w.dim() > 1], "weight_decay": 0.1},
            {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
        ]
        fused = {"fused": True} if args.optimizer == "fused" else {}
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, **fused)

    def ids(self, shift):
        s = torch.arange(self.args.samples)[:, None] * 7919
        t = (torch.arange(self.args.context)[None, :] + shift) * 104729
        return (s + t + self.step_index * 15485863) % self.args.vocab

    def step(self):
        tokens, targets = self.ids(0), self.ids(1)
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.args.dtype == "bf16"):
            loss = self.model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        self.step_index += 1
        return seconds, loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in [("threads", 2), ("vocab", 8192), ("context", 256), ("width", 512), ("layers", 8), ("heads", 8), ("samples", 8), ("steps", 5), ("kv-heads", 2), ("hidden", 1376)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--weights")
    parser.add_argument("--optimizer", choices=["fused", "default"], default="fused")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trainer = Trainer(args)
    if not args.serve:
        for step in range(args.steps):
            seconds, loss = trainer.step()
            print(f"step {step}  loss {loss:.6f}  {seconds:.3f} s")
        return
    print("ready", flush=True)
    for line in sys.stdin:
        done = [trainer.step() for _ in range(int(line))]
        print(json.dumps({"seconds": [d[0] for d in done], "losses": [d[1] for d in done]}), flush=True)


if __name__ == "__main__":
    main()
