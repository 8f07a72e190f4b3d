#!/usr/bin/env python3
"""Regenerates tests/golden/schedules: pipeline schedules of torch, and ours that torch has read.

    python3 -m venv .venv && .venv/bin/pip install torch numpy
    cargo build -p crossmesh-cli
    .venv/bin/python tests/torch_schedules.py target/debug/crossmesh

- torch_*.csv are what torch's own schedules write (`_dump_csv`), compute only and with communication.
- ours_*.csv are what crossmesh writes. This script has torch's `_PipelineScheduleRuntime` load each of them, in both formats, and
  dry-run it; one that torch does not accept ends the script.

The Rust test (crates/cli/tests/torch_schedules.rs) needs no torch: it reads torch's files, and holds crossmesh to writing the very
files that torch has accepted.
"""

import pathlib
import subprocess
import sys
import tempfile
import types

import torch
from torch.distributed.pipelining import schedules

GOLDEN = pathlib.Path(__file__).parent / "golden" / "schedules"

# Class, name, ranks, stages a rank, microbatches.
TORCH = [
    ("ScheduleInterleaved1F1B", "eager-1f1b", 4, 1, 8),
    ("ScheduleInterleaved1F1B", "interleaved-1f1b", 4, 2, 8),
    ("ScheduleInterleaved1F1B", "interleaved-1f1b", 2, 3, 4),
    ("ScheduleInterleavedZeroBubble", "interleaved-zb", 4, 2, 8),
    ("ScheduleLoopedBFS", "looped-bfs", 4, 2, 4),
    ("ScheduleZBVZeroBubble", "zbv", 4, 2, 8),
    ("ScheduleZBVZeroBubble", "zbv", 4, 2, 5),
    ("ScheduleDualPipeV", "dualpipev", 4, 2, 8),
    ("ScheduleDualPipeV", "dualpipev", 3, 2, 10),
    ("ScheduleDualPipeV", "dualpipev", 2, 2, 7),
]

# Name, stages, chunks, microbatches.
OURS = [
    ("gpipe", 4, 1, 8),
    ("1f1b", 4, 1, 8),
    ("1f1b", 3, 1, 2),
    ("eager-1f1b", 4, 1, 8),
    ("interleaved-1f1b", 4, 2, 8),
    ("interleaved-1f1b", 3, 4, 6),
    ("zb-h1", 4, 1, 8),
    ("zb-h2", 4, 1, 8),
    ("zbv", 4, 2, 8),
    ("v-half", 4, 2, 8),
    ("v-min", 4, 2, 8),
    ("v-zb", 4, 2, 8),
    ("dualpipev", 4, 2, 8),
    ("minimal-window", 4, 1, 8),
]


def stages(ranks, local):
    """What the schedules look at of a stage; nothing is run."""
    stage = dict(num_stages=ranks * local, group_size=ranks, group_rank=0, group=None, submod=None)
    return [types.SimpleNamespace(stage_index=i, **stage) for i in range(local)]


def write_torchs():
    for kind, name, ranks, local, microbatches in TORCH:
        schedule = getattr(schedules, kind)(stages(ranks, local), microbatches, loss_fn=lambda x, y: x)
        case = f"torch_{name}_p{ranks}v{local}m{microbatches}"
        schedule._dump_csv(str(GOLDEN / f"{case}.csv"), format="compute_only")
        schedule._dump_csv(str(GOLDEN / f"{case}.comms.csv"), format="compute_comms")


def load(path, format, ranks, local, microbatches):
    runtime = schedules._PipelineScheduleRuntime(stages(ranks, local), microbatches, loss_fn=lambda x, y: x)
    runtime._load_csv(str(path), format=format)
    order = runtime.pipeline_order_with_comms
    # torch's dry run knows neither its own actions for parameters nor pairs, whose parts it would run one after the other.
    skipped = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
    plain = {
        rank: [part for a in row for part in a.sub_actions or (a,) if part.computation_type.value not in skipped]
        for rank, row in order.items()
    }
    steps = schedules._simulate_comms_compute(plain, lambda s: runtime.stage_index_to_group_rank[s], ranks * local)
    assert len(steps) == ranks, path
    return len(steps[0])


def write_ours(crossmesh):
    for name, ranks, local, microbatches in OURS:
        command = [crossmesh, "schedule", name, "--stages", ranks, "--microbatches", microbatches, "--chunks", local]
        for format, ending in (("csv", "csv"), ("csv-comms", "comms.csv")):
            text = subprocess.run(
                [str(part) for part in command + ["--format", format]], check=True, capture_output=True, text=True
            ).stdout
            path = GOLDEN / f"ours_{name}_p{ranks}v{local}m{microbatches}.{ending}"
            with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
                file.write(text)
                file.flush()
                torchs = "compute_only" if format == "csv" else "compute_comms"
                steps = load(file.name, torchs, ranks, local, microbatches)
            path.write_text(text)
            print(f"{path.name}: torch accepts it and runs it dry in {steps} steps")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for old in GOLDEN.glob("*.csv"):
        old.unlink()
    write_torchs()
    write_ours(sys.argv[1])
    (GOLDEN / "VERSION").write_text(torch.__version__.split("+")[0] + "\n")


if __name__ == "__main__":
    main()
