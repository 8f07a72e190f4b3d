"""The backend, driven through vLLM's own factories: a trainer here, two workers that split a model in processes of their own.

vLLM is not installed by CI: ``pip install --no-deps vllm==0.32.0`` and what it imports (uvloop and xgrammar among it), then this file.
"""

import subprocess
import sys
import textwrap

import pytest
from ranks import free_port

pytest.importorskip("vllm", reason="vllm is not installed: its backend was not tested")

BOTH = """
import sys, types, torch
from crossmesh.integrations import vllm as ours
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
ours.register(); ours.register()
class Model(torch.nn.Module):
    # Whole, or a worker's half of it: rows of a, columns of b, all of c.
    def __init__(self, seed, rank=None):
        super().__init__()
        torch.manual_seed(seed)
        self.rank = rank
        parts = 1 if rank is None else 2
        self.a = torch.nn.Linear(5, 8 // parts).bfloat16()
        self.b = torch.nn.Linear(8 // parts, 3, bias=False)
        self.c = torch.nn.LayerNorm(4)
    def load_weights(self, weights):
        mine = dict(self.named_parameters())
        for name, value in weights:
            dim = {"a.weight": 0, "a.bias": 0, "b.weight": 1}.get(name)
            if dim is not None and self.rank is not None:
                value = value.chunk(2, dim)[self.rank]
            mine[name].data.copy_(value)
"""
WORKER = BOTH + """
import json
from vllm.model_executor.model_loader import reload
# What these two do needs a model of vLLM's own; whether they are called around `load_weights` is seen here.
calls = []
reload.initialize_layerwise_reload = lambda model: calls.append("begin")
reload.finalize_layerwise_reload = lambda model, config: calls.append("end")
rank = int(sys.argv[1])
parallel = types.SimpleNamespace(world_size=2, rank=rank, data_parallel_index=0)
config = types.SimpleNamespace(parallel_config=parallel, model_config=None)
model = Model(99, rank)
engine = WeightTransferEngineFactory.create_engine(types.SimpleNamespace(backend="crossmesh"), config, torch.device("cpu"), model)
for line in sys.stdin:
    word, value = json.loads(line)
    before = {n: p.clone() for n, p in model.named_parameters()}
    if word == "init":
        engine.init_transfer_engine(engine.parse_init_info(value))
    if word == "start":
        engine.start_weight_update()
    if word == "update":
        engine.update_weights(value)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters()), "touched before everything arrived"
    if word == "finish":
        engine.finish_weight_update()
    values = {n: p.double().flatten().tolist() for n, p in model.named_parameters()}
    print(json.dumps([values, calls]), flush=True)
got = engine._subscriber.timings()["bytes_received"]
assert got == (4 * 5 + 4) * 2 + 3 * 4 * 4 + 2 * 4 * 4, got  # its half of `a` and `b`, and all of `c`
engine.shutdown()
"""
TRAINER = BOTH + """
import json, subprocess
start = lambda rank: subprocess.Popen([sys.executable, "-c", sys.argv[2], str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
workers = [start(rank) for rank in range(2)]
class Client:
    def say(self, word, value=None):
        for worker in workers:
            worker.stdin.write(json.dumps([word, value]) + "\\n"); worker.stdin.flush()
        self.values = []
        for worker in workers:
            for line in worker.stdout:
                if line.startswith("[{"):
                    values, self.calls = json.loads(line)
                    self.values.append(values)
                    break
            else:
                raise AssertionError("a worker has ended")
    def init_weight_transfer_engine(self, info): self.say("init", info)
    def start_weight_update(self): self.say("start")
    def update_weights(self, info): self.say("update", info)
    def finish_weight_update(self, weight_version=None): self.say("finish")
model, client = Model(1), Client()
init = ours.CrossmeshTrainerInitInfo("127.0.0.1:" + sys.argv[1], 2, rank=0)
trainer = WeightTransferTrainerFactory.trainer_init(init, client=client, source=ModuleSource(model))
for step in range(2):
    with torch.no_grad():
        model.a.weight.add_(step)
    trainer.send_weights()
    for rank, values in enumerate(client.values):
        expected = Model(7, rank)
        expected.load_weights(model.state_dict().items())
        assert values == {n: p.double().flatten().tolist() for n, p in expected.named_parameters()}, values
assert client.calls == ["begin", "end"] * 2
for worker in workers:
    worker.stdin.close()
assert [worker.wait(20) for worker in workers] == [0, 0]
trainer.shutdown()
print("both ways")
"""


def test_a_round_trip_through_the_factories(monkeypatch):
    monkeypatch.setenv("CROSSMESH_SECRET", "a secret for a worker of vLLM")
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), str(free_port()), WORKER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "both ways" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]
