"""The backend, driven through vLLM 0.32.0's own factories, worker, client, loaders and reload: two trainer ranks, two workers that split a model.

CI unpacks vLLM without its dependencies, and what it imports (``frameworks.txt``). No server of vLLM's runs without a GPU: what is a server's part here,
handing a request to all workers, is ours.
"""

import json
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest
from ranks import free_port

pytest.importorskip("torch", reason="torch is not installed: vLLM's backend was not tested")
from vllm_ranks import save

UNPACKED = os.environ.get("CROSSMESH_FRAMEWORKS")
if UNPACKED is None:
    pytest.importorskip("vllm", reason="vllm is not installed: its backend was not tested")
PATIENCE_S = 300
SCRIPT = pathlib.Path(__file__).with_name("vllm_ranks.py")


class Process:
    """One of vllm_ranks.py; what else it says is kept for when it fails."""

    def __init__(self, *words, **env):
        paths = [UNPACKED or "", *os.environ.get("PYTHONPATH", "").split(":")]
        env = os.environ | {"PYTHONPATH": ":".join(filter(None, paths)), "CROSSMESH_SECRET": "a secret for a worker of vLLM"} | env
        env |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.process = subprocess.Popen([sys.executable, SCRIPT, *map(str, words)], env=env, **pipes)
        self.said = []

    def tell(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self):
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError("it has ended\n" + "".join(self.said[-40:]))

    def ends(self):
        said = self.process.communicate(timeout=PATIENCE_S)[0]
        assert self.process.returncode == 0, "".join(self.said[-40:]) + said[-4000:]
        return said


class Server(ThreadingHTTPServer):
    """What vLLM's server does with these requests: it has all workers do them. ``calls`` are their paths, and what workers said."""

    def __init__(self, workers):
        self.workers, self.calls, self.ready = workers, [], Event()
        super().__init__(("127.0.0.1", 0), Request)
        Thread(target=self.serve_forever, daemon=True).start()

    def does(self, path, given):
        assert self.ready.wait(PATIENCE_S)
        for worker in self.workers:
            worker.tell(path, *given)
        with ThreadPoolExecutor(len(self.workers)) as pool:
            self.calls.append((path, list(pool.map(Process.answer, self.workers))))


class Request(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        try:
            self.server.does(self.path.strip("/"), list(body.values()) if body else [])
            self.send_response(200)
        except Exception as error:
            self.send_response(500, str(error).splitlines()[0])
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_model_of_vllm_through_its_factories(tmp_path):
    """Fused q, k and v, fused gate and up of experts, columns, replicas: every parameter is that of a checkpoint that vLLM loads."""
    started = []

    def start(*words, **env):
        started.append(Process(*words, tmp_path, **env))
        return started[-1]

    save(tmp_path)
    port, address = free_port(), f"127.0.0.1:{free_port()}"
    workers = [start("worker", rank, port) for rank in range(2)]
    server = Server(workers)
    where = dict(SERVER=f"http://127.0.0.1:{server.server_port}", ADDRESS=address)
    try:
        theirs = free_port()
        trainers = [start("trainer", rank, theirs, **where) for rank in range(2)]
        assert [worker.answer() for worker in workers] == [{"parameters": 21}] * 2
        server.ready.set()
        assert all("sent" in trainer.ends() for trainer in trainers)
        update = ["start_weight_update", "update_weights", "finish_weight_update"]
        assert [path for path, _ in server.calls] == ["init_weight_transfer_engine", *update * 2]
        # At each of these moments, all of one version and nothing of another, where it was before.
        assert [said for _, said in server.calls] == [[{"differs": [], "moved": []}] * 2] * 7
        for worker in workers:
            worker.process.stdin.close()
            said = worker.answer()
            assert said["received"] == said["held"], said  # its slices, and nothing else
            assert worker.process.wait(60) == 0, worker.said
    finally:
        server.shutdown()
        for one in started:
            one.process.kill()
            one.process.wait()
            print(*one.said[-20:])  # shown where the test fails
