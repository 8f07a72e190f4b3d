#!/usr/bin/env python3
"""Holds our Llama against one written down in plain torch, in double precision. `cargo xtask python` runs it where torch is there.

    cargo build -p crossmesh-train --example gpt_logits
    python3 tests/torch_llama.py target/debug

transformers is no judge of double precision: its norms and angles are computed in single precision always. So here is the model once more,
as short as it can be said: RMS norms, rotary positions (also with Llama 3.1's scaling), grouped-query attention, SwiGLU. Logits and every gradient
agree to 1e-10 of the largest.
"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile

import torch

# vocab, context, width, layers, heads, hidden, heads of keys and values
SIZES = [(13, 7, 24, 2, 6, 31, 3), (29, 16, 48, 3, 4, 40, 1), (17, 9, 40, 2, 4, 24, 4), (64, 32, 64, 2, 8, 96, 2)]
CLOSE = 1e-10
# Factor, low and high number of turns, the old context: what `--scaled` means.
SCALING = (8.0, 1.0, 4.0, 16.0)


def call(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def norm(x, weight, epsilon=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight


def angles(context, head, scaled):
    turns = 10_000.0 ** (-torch.arange(head // 2, dtype=torch.float64) / (head // 2))
    if scaled:
        factor, low, high, old = SCALING
        fast = ((old * turns / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        turns = turns * (fast + (1 - fast) / factor)
    return torch.arange(context, dtype=torch.float64)[:, None] * turns


def rotate(x, angle):
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def logits(w, ids, sizes, scaled):
    _, context, width, layers, heads, _, kv_heads = sizes
    head = width // heads
    angle = angles(context, head, scaled)
    unseen = torch.ones(context, context, dtype=torch.bool).triu(1)
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(layers):
        of = {name.removeprefix(f"model.layers.{layer}."): v for name, v in w.items()}
        h = norm(x, of["input_layernorm.weight"])
        cut = lambda name, n: (h @ of[f"self_attn.{name}.weight"].T).unflatten(-1, (n, head)).transpose(1, 2)
        q, k, v = rotate(cut("q_proj", heads), angle), rotate(cut("k_proj", kv_heads), angle), cut("v_proj", kv_heads)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2) / head**0.5).masked_fill(unseen, -torch.inf).softmax(-1)
        x = x + (scores @ v).transpose(1, 2).flatten(2) @ of["self_attn.o_proj.weight"].T
        h = norm(x, of["post_attention_layernorm.weight"])
        gate = h @ of["mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ of["mlp.up_proj.weight"].T)) @ of["mlp.down_proj.weight"].T
    table = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, w["model.norm.weight"]) @ table.T


def shape(name, sizes):
    vocab, _, width, _, heads, hidden, kv_heads = sizes
    head = width // heads
    known = {"q_proj": (width, width), "k_proj": (kv_heads * head, width), "v_proj": (kv_heads * head, width),
             "o_proj": (width, width), "gate_proj": (hidden, width), "up_proj": (hidden, width),
             "down_proj": (width, hidden), "embed_tokens": (vocab, width), "lm_head": (vocab, width)}
    return known.get(name.split(".")[-2], (width,))


def apart(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def compare(bins, folder, sizes, tied, scaled):
    vocab, context = sizes[:2]
    flags = ([] if tied else ["--untied"]) + (["--scaled"] if scaled else [])
    new = call(bins / "examples" / "gpt_logits", "--new", folder, ",".join(map(str, sizes)), *flags).strip()
    ids = torch.tensor([[(i * 7 + s * 5 + i * i * 3) % vocab for i in range(context)] for s in range(2)])
    flat = ",".join(str(t) for t in ids.flatten().tolist())
    said = json.loads(call(bins / "examples" / "gpt_logits", new, flat, "--gradients", "--weights", "--f64"))
    tensor = lambda name, values: torch.tensor(values, dtype=torch.float64).reshape(shape(name, sizes))
    w = {name: tensor(name, values).requires_grad_() for name, values in said["weights"].items()}
    wanted = logits(w, ids, sizes, scaled)
    loss = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), ids.flatten().roll(-1))
    loss.backward()
    worst = apart(torch.tensor(said["logits"], dtype=torch.float64).reshape(wanted.shape), wanted.detach())
    worst_gradient = max(apart(tensor(name, g), w[name].grad) for name, g in said["gradients"].items())
    assert said["gradients"].keys() == w.keys()
    off = abs(said["loss"] - loss.item())
    what = f"{sizes} {'tied' if tied else 'untied'}{' scaled' if scaled else ''}"
    print(f"{what:44} logits {worst:.1e}   loss {off:.1e}   gradients {worst_gradient:.1e}")
    assert max(worst, off, worst_gradient) <= CLOSE, what


def main():
    bins = pathlib.Path(sys.argv[1])
    for sizes in SIZES:
        for tied, scaled in [(False, False), (True, True)]:
            with tempfile.TemporaryDirectory() as folder:
                compare(bins, folder, sizes, tied, scaled)
    print("the same")


if __name__ == "__main__":
    main()
