"""Processes as ranks of a job, for tests."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

HEAD = f"""
import os, sys, time
import numpy as np
import crossmesh as cm
sys.path.append({os.path.dirname(os.path.abspath(__file__))!r})
from ranks import allowed, leave
rank = int(os.environ["RANK"])
"""


def leave(failed=False):
    """Ends a process of a gloo group once all are through. Without the interpreter's own way out: gloo's threads are still there
    then, and now and then one such process is aborted (SIGABRT, after everything was right).
    """
    import torch.distributed as dist

    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(bool(failed)))


def allowed(seconds):
    """What is demanded of an idle machine, as time on this one: where more runs than there are cores, everybody is slower; four times at most.

    The mean of a minute, and what runs at this moment: of work that has just begun the mean knows nothing yet.
    """
    with open("/proc/loadavg") as file:
        mean, _, _, now, _ = file.read().split()
    load = max(float(mean), int(now.split("/")[0]))
    return seconds * min(4.0, max(1.0, load / (os.cpu_count() or 1)))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Ranks:
    """Starts a script as ranks; they are ended with the block, however it ends, and so are processes of theirs: Megatron keeps one that writes."""

    def __init__(self, count, script, **env):
        port, script = free_port(), HEAD + textwrap.dedent(script)
        said = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        said |= {"CROSSMESH_SECRET": "0123456789abcdef" * 4, "OMP_NUM_THREADS": 1} | env
        self.started = time.monotonic()
        self.processes = []
        for rank in range(count):
            mine = os.environ | {k: str(v) for k, v in (said | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.processes.append(subprocess.Popen([sys.executable, "-c", script], env=mine, start_new_session=True, **pipes))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # nobody of the group is left
            process.communicate()

    def line(self, rank):
        """The next line that a rank prints."""
        return self.processes[rank].stdout.readline().strip()

    def ends(self, timeout=30):
        """Exit status, output and errors of all, once they have ended; a test that measures time does so itself."""
        ends, timeout = [], allowed(timeout)
        for process in self.processes:
            out, err = process.communicate(timeout=timeout)
            ends.append((process.returncode, out, err))
        return ends


def run(count, script, timeout=30, **env):
    """What ranks print; they have to end well."""
    with Ranks(count, script, **env) as ranks:
        ends = ranks.ends(timeout)
    for rank, (code, out, err) in enumerate(ends):
        assert code == 0, f"rank {rank} ended with {code}\n{out}\n{err}"
    return [out.strip() for _, out, _ in ends]
