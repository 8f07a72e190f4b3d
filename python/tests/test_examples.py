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


def test_the_gap_as_a_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the plot of the gap was not drawn")
    picture = tmp_path / "gap.png"
    ran(sys.executable, EXAMPLES / "gap.py", picture)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 5_000


def test_fsdp2_to_tensor_parallelism():
    pytest.importorskip("torch", reason="torch is not installed: the example with FSDP2 was not run")
    said = ran(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", EXAMPLES / "fsdp2_to_tp.py")
    assert said.count("bit for bit") == 8, said


def test_the_same_from_jax():
    pytest.importorskip("jax", reason="jax is not installed: its example was not run")
    said = ran(COMMAND, "launch", "-n", "8", "--", sys.executable, EXAMPLES / "jax_to_tp.py")
    assert said.count("bit for bit") == 8, said
