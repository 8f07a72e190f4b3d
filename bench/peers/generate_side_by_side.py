"""`crossmesh generate` and transformers' `generate`, greedy, in turns in one run: tokens a second, and whether they say the same. Needs torch and transformers.

    cargo build --release -p crossmesh-cli
    python3 bench/peers/generate_side_by_side.py [--ours target/release/crossmesh] [--rounds 5] [--threads 2] [--tokens 128]

A Llama with random weights, read by both from the same file. Ours is a process a round, so what it takes to start and to load is left out of both: seconds count from the
prompt to the last token.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", default="target/release/crossmesh")
    for name, default in [
        ("rounds", 5), ("threads", 2), ("tokens", 128), ("vocab", 8192), ("width", 512), ("layers", 8), ("heads", 8), ("kv-heads", 2), ("hidden", 1376),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=args.vocab, hidden_size=args.width, intermediate_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads, max_position_embeddings=1024, rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = [(i * 7919 + 13) % args.vocab for i in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model.save_pretrained(folder / "hf")
        subprocess.run([args.ours, "checkpoint", "import", folder / "hf" / "model.safetensors", "-o", folder / "ours"], check=True, stdout=subprocess.DEVNULL)
        command = [args.ours, "generate", folder / "ours", "--tokenizer", "ids", "--prompt", " ".join(map(str, prompt)), "-n", str(args.tokens)]
        command += ["--threads", str(args.threads), "--format", "json"]
        ours, theirs, said = [], [], None
        for _ in range(args.rounds + 1):
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            ours.append(args.tokens / answer["seconds"])
            start = time.perf_counter()
            with torch.no_grad():
                ids = model.generate(torch.tensor([prompt]), max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=False)
            theirs.append(args.tokens / (time.perf_counter() - start))
            said = (answer["ids"], ids[0, len(prompt):].tolist())
    # The first round warms both up.
    ours, theirs = ours[1:], theirs[1:]
    ratios = sorted(a / b for a, b in zip(ours, theirs))
    print(f"crossmesh    {statistics.median(ours):8.1f} tokens/s, {min(ours):.1f} to {max(ours):.1f}")
    print(f"transformers {statistics.median(theirs):8.1f} tokens/s, {min(theirs):.1f} to {max(theirs):.1f}")
    print(f"ours over theirs: median {statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}, {args.rounds} rounds in turns")
    if said[0] != said[1]:
        sys.exit(f"they do not say the same: {said[0][:20]} and {said[1][:20]}")
    print(f"{args.tokens} tokens, the same")


if __name__ == "__main__":
    main()
