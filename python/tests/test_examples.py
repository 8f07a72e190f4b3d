"""The examples run."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples/python"
COMMAND = pathlib.Path(sys.executable).with_name("crossmesh")


def ran(*words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fsdp_to_tensor_parallelism():
    said = ran(COMMAND, "launch", "-n", "8", "--", sys.executable, EXAMPLES / "fsdp_to_tp.py")
    assert said.count("bit for bit") == 8, said


def test_the_gap_of_strategies():
    rows = ran(sys.executable, EXAMPLES / "gap.py").splitlines()[1:]
    assert len(rows) == 4 and all(float(row.split()[-1]) <= 1.05 for row in rows), rows


def test_the_same_from_jax():
    pytest.importorskip("jax", reason="jax is not installed: its example was not run")
    said = ran(COMMAND, "launch", "-n", "8", "--", sys.executable, EXAMPLES / "jax_to_tp.py")
    assert said.count("bit for bit") == 8, said
