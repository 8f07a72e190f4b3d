"""The tables of train.sh: losses side by side, MFU beside torch's. Operations are counted here once more, from the shapes."""

import json
import pathlib
import statistics

from train_shapes import PEAK, SHAPES, operations

RUNS = pathlib.Path("runs")


def metrics(name):
    path = RUNS / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(name):
    return {row["step"]: row["loss"] for row in metrics(name)}


def apart(one, two, steps):
    a, b = losses(one), losses(two)
    if not all(step in a and step in b for step in steps):
        return f"missing: {one} has {len(a)} steps, {two} {len(b)}"
    return f"{max(abs(a[s] - b[s]) / abs(b[s]) for s in steps):.2e}"


print("| losses | farthest apart, relative |\n|---|---|")
for kind in ("gpt", "llama"):
    print(f"| {kind}, f32, 50 steps, card and host | {apart(f'f32-{kind}-cuda', f'f32-{kind}-cpu', range(1, 51))} |")
    ends = [statistics.mean(list(losses(f"bf16-{kind}-{d}").values())[-20:] or [float("nan")]) for d in ("cuda", "cpu")]
    print(f"| {kind}, bf16, mean of steps 481 to 500: {ends[0]:.4f} and {ends[1]:.4f} | {abs(ends[0] / ends[1] - 1):.2e} |")
    print(f"| {kind}, bf16, 40 steps at once and resumed at 20 | {apart(f'whole-{kind}', f'parts-{kind}', range(1, 41))} |")
    print(f"| {kind}, f32, card, host, card and host alone, 60 steps | {apart(f'mixed-{kind}', f'host-{kind}', range(1, 61))} |")

print("\n| model | ms a step | shortest, longest | MFU | as printed | torch.compile, ms | its MFU | its peak memory |\n|---|---|---|---|---|---|---|---|")
for name, shape in SHAPES.items():
    took = sorted(row["step_s"] for row in metrics(f"speed-{name}")[5:])
    torch_file = RUNS / f"torch-{name.removeprefix('gpt-').removesuffix('-1b')}.json"
    torch = json.loads(torch_file.read_text()) if torch_file.exists() else None
    mfu = lambda seconds: f"{operations(*shape) / seconds / PEAK:.3f}"
    theirs = statistics.median(torch["step_s"]) if torch else None
    cells = [f"{theirs * 1e3:.1f}", mfu(theirs), f"{torch['peak_bytes'] / 2**30:.2f} GiB"] if torch else ["-"] * 3
    if took:
        half = statistics.median(took)
        printed = statistics.median(row["mfu"] for row in metrics(f"speed-{name}")[5:])
        ours = [f"{half * 1e3:.1f}", f"{took[0] * 1e3:.1f}, {took[-1] * 1e3:.1f}", mfu(half), f"{printed:.3f}"]
    else:
        ours = ["-"] * 4
    print("| " + " | ".join([name, *ours, *cells]) + " |")
