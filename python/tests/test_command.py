"""The package brings the command, which starts itself again for the ranks of a run."""

import pathlib
import subprocess
import sys

COMMAND = pathlib.Path(sys.executable).with_name("crossmesh")


def crossmesh(*words, status=0):
    ran = subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=60)
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran.stdout


def test_it_plans_and_runs_and_says_no():
    pair = ["f32[8,6]@A{tp:2}(tp,_)", "f32[8,6]@B{tp:1}(_,tp)"]
    assert "lower bound" in crossmesh("explain", *pair)
    assert "every element checked" in crossmesh("run", *pair)
    crossmesh("explain", "f32[8]@A{tp:2}(dp)", pair[1], status=2)
    as_module = subprocess.run([sys.executable, "-m", "crossmesh", "--version"], capture_output=True, text=True, timeout=60)
    assert as_module.stdout.startswith("crossmesh ")


def test_it_launches_ranks_of_python():
    script = "import crossmesh as cm; job = cm.init(); print(job.rank, job.size, job.launcher); job.close()"
    said = crossmesh("launch", "-n", "2", "--", sys.executable, "-c", script)
    assert "0 2 crossmesh launch" in said and "1 2 crossmesh launch" in said, said
