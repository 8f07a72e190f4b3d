"""Our GPT step and torch eager's, in turns in one run: times, their ratio, and whether the losses agree. Needs torch.

    cargo build --release -p crossmesh-train --example gpt_step
    python3 bench/peers/gpt_side_by_side.py [--ours target/release/examples/gpt_step] [--rounds 8] [-- --threads 1 ..]

What is behind `--` goes to all programs (sizes, threads, --llama, --dtype). All start from the same weights and see the same tokens. With
`--dtype bf16` ours in f32 takes its turns too: bf16 is to be no slower than that.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


class Program:
    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()
        self.seconds, self.losses = [], []

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args} ended with {self.process.wait()}")
        return line

    def steps(self, count, keep=True):
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        answer = json.loads(self.answer())
        self.losses += answer["losses"]
        if keep:
            self.seconds += answer["seconds"]


def in_f32(rest):
    """The same words for a program that computes in f32."""
    words = " ".join(rest).replace("--dtype=", "--dtype ").split()
    at = words.index("--dtype")
    return words[:at] + words[at + 2:]


def ratio(name, ours, others):
    ratios = sorted(a / b for a, b in zip(ours.seconds, others.seconds))
    print(f"ours over {name}: median {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f},"
          f" {len(ratios)} rounds in turns")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", default="target/release/examples/gpt_step")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--optimizer", choices=["fused", "default"], default="fused")
    parser.add_argument("rest", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = os.path.join(folder, "weights")
        ours = Program([args.ours, "--serve", "--weights", weights, *args.rest])
        torch = [sys.executable, str(HERE / "torch_gpt.py"), "--serve", "--weights", weights]
        torch = Program(torch + ["--optimizer", args.optimizer, *args.rest])
        programs = {"ours": ours, "torch eager": torch}
        is_bf16 = any("bf16" in word for word in args.rest)
        if is_bf16:
            programs["ours, f32"] = Program([args.ours, "--serve", *in_f32(args.rest)])
    for program in programs.values():
        program.steps(2, keep=False)
    for number in range(args.rounds):
        for program in programs.values():
            program.steps(1)
        now = ", ".join(f"{name} {program.seconds[-1]:.3f} s" for name, program in programs.items())
        print(f"round {number + 1} of {args.rounds}: {now}", flush=True)
    for name, program in programs.items():
        s = program.seconds
        print(f"{name:12} median {statistics.median(s):.3f} s, {min(s):.3f} to {max(s):.3f}, loss {program.losses[0]:.6f} -> {program.losses[-1]:.6f}")
    for name, program in list(programs.items())[1:]:
        ratio(name, ours, program)
    apart = max(abs(o - t) / t for program in list(programs.values())[1:] for o, t in zip(ours.losses, program.losses))
    print(f"losses of {len(ours.losses)} steps agree to {apart:.1e}", flush=True)
    if apart > (1e-2 if is_bf16 else 1e-4):
        sys.exit("they do not compute the same")


if __name__ == "__main__":
    main()
