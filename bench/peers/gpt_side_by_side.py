"""Our GPT step and torch eager's, in turns in one run: times, their ratio, and whether the losses agree. Needs torch.

    cargo build --release -p crossmesh-train --example gpt_step
    python3 bench/peers/gpt_side_by_side.py [--ours target/release/examples/gpt_step] [--rounds 8] [-- --threads 1 ..]

What is behind `--` goes to both programs (sizes, threads). Both start from the same weights and see the same tokens.
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
    for program in (ours, torch):
        program.steps(2, keep=False)
    for _ in range(args.rounds):
        ours.steps(1)
        torch.steps(1)
    for name, program in (("ours", ours), ("torch eager", torch)):
        s = program.seconds
        print(f"{name:12} median {statistics.median(s):.3f} s, {min(s):.3f} to {max(s):.3f}, loss {program.losses[0]:.6f} -> {program.losses[-1]:.6f}")
    ratios = sorted(o / t for o, t in zip(ours.seconds, torch.seconds))
    print(f"ours over torch: median {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} rounds in turns")
    apart = max(abs(o - t) / t for o, t in zip(ours.losses, torch.losses))
    print(f"losses of {len(ours.losses)} steps agree to {apart:.1e}")
    if apart > 1e-4:
        sys.exit("they do not compute the same")


if __name__ == "__main__":
    main()
