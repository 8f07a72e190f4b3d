#!/usr/bin/env python3
"""Compares our GPT and our Llama with Hugging Face transformers', both ways. `cargo xtask python` runs it where transformers is there. By hand:

    python3 -m venv .venv && .venv/bin/pip install torch transformers
    cargo build --release -p crossmesh-cli -p crossmesh-train --example gpt_logits --bin crossmesh
    .venv/bin/python tests/transformers_export.py target/release

- out: an untrained model of ours (no weight of it zero or one) is exported; transformers loads it, and says the same about tokens.
- in:  a model of transformers is saved, imported, and says the same about tokens here.
- in:  the same with the names of the first GPT-2 files (no prefix, masks among the weights).
- llama: a Llama of transformers, with and without Llama 3.1's rotary scaling, tied and not, is imported: logits and every gradient agree; ours is
  exported and agrees too.
- back: what was imported and exported again is byte by byte the file it came from.
- validation: the last validation loss of a run is what transformers says of the same windows, with the exported model.
- talk: greedy generation says the same 64 tokens as `generate`, on one process and on four (--tp 2 --stages 2); from a release build, tokens a second
  side by side too.

Same means: logits within 1e-4 and the loss within 1e-5, f32 on both sides. Ends with an error where they are not.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time

import safetensors.torch
import torch
import transformers

LOGITS, LOSS = 1e-4, 1e-5
# vocab, context, width, layers, heads, hidden
SIZES = [(13, 7, 20, 2, 5, 31), (97, 32, 48, 3, 4, 192), (512, 64, 128, 6, 8, 512)]


# vocab, context, width, layers, heads, hidden, heads of keys and values
LLAMAS = [(13, 7, 24, 2, 6, 31, 3), (97, 32, 48, 3, 4, 160, 1), (512, 64, 128, 4, 8, 352, 2)]
GRADIENTS = 1e-4


def call(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def tokens(vocab, context, samples=2):
    return torch.tensor([[(i * 7 + s * 5 + i * i * 3) % vocab for i in range(context)] for s in range(samples)])


def ours(bins, checkpoint, ids):
    flat = ",".join(str(t) for t in ids.flatten().tolist())
    said = json.loads(call(bins / "examples" / "gpt_logits", checkpoint, flat))
    return torch.tensor(said["logits"]).reshape(*ids.shape, -1), said["loss"]


def theirs(model, ids):
    with torch.no_grad():
        logits = model.eval()(ids).logits
    targets = ids.flatten().roll(-1)
    return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).item()


def compare(what, a, b):
    logits = (a[0] - b[0]).abs().max().item()
    loss = abs(a[1] - b[1])
    print(f"{what:38} logits {logits:.1e} of {b[0].abs().max().item():.1f}   loss {loss:.1e} of {b[1]:.4f}")
    assert a[0].shape == b[0].shape, (a[0].shape, b[0].shape)
    assert logits <= LOGITS and loss <= LOSS, what


def outwards(bins, folder, sizes, tied):
    flags = [] if tied else ["--untied"]
    new = call(bins / "examples" / "gpt_logits", "--new", folder / "new", ",".join(map(str, sizes)), *flags)
    checkpoint = new.strip()
    call(bins / "crossmesh", "checkpoint", "export", checkpoint, "-o", folder / "exported")
    model, info = transformers.GPT2LMHeadModel.from_pretrained(folder / "exported", output_loading_info=True)
    lost = {key: value for key, value in info.items() if value}
    assert not lost, lost
    ids = tokens(*sizes[:2])
    compare(f"out {sizes} {'tied' if tied else 'untied'}", ours(bins, checkpoint, ids), theirs(model, ids))


def llama_out(bins, folder, sizes):
    new = call(bins / "examples" / "gpt_logits", "--new", folder / "new", ",".join(map(str, sizes)), "--untied")
    checkpoint = new.strip()
    call(bins / "crossmesh", "checkpoint", "export", checkpoint, "-o", folder / "exported")
    model, info = transformers.LlamaForCausalLM.from_pretrained(folder / "exported", output_loading_info=True)
    lost = {key: value for key, value in info.items() if value}
    assert not lost, lost
    ids = tokens(*sizes[:2])
    compare(f"llama out {sizes}", ours(bins, checkpoint, ids), theirs(model, ids))


def llama_in(bins, folder, sizes, tied, scaled):
    vocab, context, width, layers, heads, hidden, kv_heads = sizes
    torch.manual_seed(5)
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    if scaled:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 16}
    config = transformers.LlamaConfig(
        vocab_size=vocab, max_position_embeddings=context, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=hidden, initializer_range=0.1,
        tie_word_embeddings=tied, rope_parameters=rope, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "theirs")
    call(bins / "crossmesh", "checkpoint", "import", folder / "theirs" / "model.safetensors", "-o", folder / "imported")
    checkpoint = folder / "imported" / "step-00000000"
    ids = tokens(vocab, context)
    what = f"llama in {sizes} {'tied' if tied else 'untied'}{' scaled' if scaled else ''}"
    compare(what, ours(bins, checkpoint, ids), theirs(model, ids))
    flat = ",".join(str(t) for t in ids.flatten().tolist())
    said = json.loads(call(bins / "examples" / "gpt_logits", checkpoint, flat, "--gradients"))["gradients"]
    model.train()
    targets = ids.flatten().roll(-1)
    torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), targets).backward()
    worst = 0.0
    for name, parameter in model.named_parameters():
        got = torch.tensor(said.pop(name)).reshape(parameter.shape)
        worst = max(worst, ((got - parameter.grad).abs().max() / parameter.grad.abs().max()).item())
    assert not said, said.keys()
    print(f"{'':38} gradients {worst:.1e}")
    assert worst <= GRADIENTS, what
    back(bins, folder)


def back(bins, folder):
    """What was imported, exported again: the same bytes."""
    call(bins / "crossmesh", "checkpoint", "export", folder / "imported", "-o", folder / "again")
    before, after = ((folder / of / "model.safetensors").read_bytes() for of in ("theirs", "again"))
    assert before == after, "the file is another"


def talk(bins, folder, kind, sizes):
    vocab, context, width, layers, heads, hidden, kv_heads = sizes
    torch.manual_seed(7)
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=vocab, max_position_embeddings=context, hidden_size=width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=hidden, initializer_range=0.1, **none))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=vocab, n_positions=context, n_embd=width, n_layer=layers, n_head=heads, n_inner=hidden,
            initializer_range=0.1, **none))
    model.eval().save_pretrained(folder / "theirs")
    call(bins / "crossmesh", "checkpoint", "import", folder / "theirs" / "model.safetensors", "-o", folder / "imported")
    prompt, torch_threads = [3, 1, 4, 1, 5], torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        ask = lambda: model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
        ask()
        start = time.perf_counter()
        wanted = ask()[0, len(prompt):].tolist()
        theirs_s = time.perf_counter() - start
    torch.set_num_threads(torch_threads)
    ask = [bins / "crossmesh", "generate", folder / "imported", "--tokenizer", "ids", "--format", "json", "-n", TOKENS,
           "--prompt", " ".join(map(str, prompt))]
    for tp, stages in [(1, 1), (2, 1), (2, 2)]:
        said = json.loads(call(*ask, "--tp", tp, "--stages", stages))
        speed = f": {TOKENS / said['seconds']:.0f} tokens/s, transformers {TOKENS / theirs_s:.0f}"
        print(f"talk {kind} {sizes} tp {tp}, {stages} stages{speed if bins.name == 'release' else ''}")
        assert said["ids"] == wanted, (said["ids"], wanted)
        own = (layers + 2) // stages - 1 if stages > 1 else layers
        shared = -(-kv_heads // tp)
        assert said["cache_elements"] == 2 * own * shared * (width // heads) * (len(prompt) + TOKENS), said["cache_elements"]


def inwards(bins, folder, sizes, tied, older):
    vocab, context, width, layers, heads, hidden = sizes
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        vocab_size=vocab, n_positions=context, n_embd=width, n_layer=layers, n_head=heads, n_inner=hidden,
        initializer_range=0.1, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, weight.mean().item(), 0.1)
    model.save_pretrained(folder / "theirs")
    path = folder / "theirs" / "model.safetensors"
    if older:
        weights = safetensors.torch.load_file(path)
        weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
        weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, context, context) for i in range(layers)}
        safetensors.torch.save_file(weights, path)
    call(bins / "crossmesh", "checkpoint", "import", path, "-o", folder / "imported")
    ids = tokens(vocab, context)
    checkpoint = folder / "imported" / "step-00000000"
    name = f"in  {sizes} {'older' if older else 'tied' if tied else 'untied'}"
    compare(name, ours(bins, checkpoint, ids), theirs(model, ids))
    call(bins / "crossmesh", "checkpoint", "export", folder / "imported", "-o", folder / "back")
    back = safetensors.torch.load_file(folder / "back" / "model.safetensors")
    state = {name: weight for name, weight in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    assert back.keys() == state.keys(), back.keys() ^ state.keys()
    assert all(torch.equal(back[name], weight) for name, weight in state.items())


def validation(bins, folder, kind):
    """A run's last validation, and what transformers makes of the same windows."""
    context, vocab, share, batch = 24, 61, 0.2, 4
    ids = [(i * i * 7 + i // 5 + (i * 13) % 11) % vocab for i in range(3000)]
    (folder / "ids.bin").write_bytes(b"".join(i.to_bytes(2, "little") for i in ids))
    mesh = {"gpt": "dp 2", "llama": "tp 4"}[kind]
    (folder / "run.toml").write_text(f"""
[model]
kind = "{kind}"
vocab = {vocab}
context = {context}
width = 32
layers = 2
heads = 8
{'kv_heads = 2' if kind == 'llama' else ''}
[data]
kind = "tokens"
path = "{folder / 'ids.bin'}"
validation_share = {share}
[train]
steps = 6
batch = {batch}
microbatches = 2
[evaluate]
every = 3
batches = 5
[log]
folder = "{folder / 'run'}"
[checkpoint]
folder = "{folder / 'saved'}"
[[stage]]
mesh = "{mesh}"
[[stage]]
mesh = "1"
""")
    call(bins / "crossmesh", "train", folder / "run.toml")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    said = [line["validation_loss"] for line in lines if line.get("validation_loss") is not None][-1]
    call(bins / "crossmesh", "checkpoint", "export", folder / "saved", "-o", folder / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    start = len(ids) - int(len(ids) * share)
    count = (len(ids) - start - 1) // context
    rows = [ids[start + i % count * context:][:context + 1] for i in range(5 * batch)]
    windows = torch.tensor(rows)
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    print(f"validation {kind:28} {said:.6f} and {wanted:.6f}")
    assert abs(said - wanted) <= LOSS, (said, wanted)


TOKENS = 64
# The heads of keys of a GPT-2 are its heads.
TALKS = [("gpt2", (97, 96, 64, 4, 4, 256, 4)), ("llama", (97, 96, 64, 4, 8, 160, 4)), ("llama", (512, 128, 256, 6, 8, 688, 2))]


def main():
    bins = pathlib.Path(sys.argv[1])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for sizes in SIZES:
        for tied in [True, False]:
            with tempfile.TemporaryDirectory() as folder:
                outwards(bins, pathlib.Path(folder), sizes, tied)
            for older in [False, True] if tied else [False]:
                with tempfile.TemporaryDirectory() as folder:
                    inwards(bins, pathlib.Path(folder), sizes, tied, older)
    for sizes in LLAMAS:
        with tempfile.TemporaryDirectory() as folder:
            llama_out(bins, pathlib.Path(folder), sizes)
        for tied, scaled in [(False, False), (True, True)]:
            with tempfile.TemporaryDirectory() as folder:
                llama_in(bins, pathlib.Path(folder), sizes, tied, scaled)
    for kind in ["gpt", "llama"]:
        with tempfile.TemporaryDirectory() as folder:
            validation(bins, pathlib.Path(folder), kind)
    for kind, sizes in TALKS:
        with tempfile.TemporaryDirectory() as folder:
            talk(bins, pathlib.Path(folder), kind, sizes)
    print("the same")


if __name__ == "__main__":
    main()
