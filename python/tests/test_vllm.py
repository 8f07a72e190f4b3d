"""The backend, driven through vLLM's own factories: a trainer here, a worker in a process of its own.

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
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.a = torch.nn.Linear(5, 7).bfloat16()
        self.b = torch.nn.Linear(7, 3, bias=False)
    def load_weights(self, weights):
        mine = dict(self.named_parameters())
        for name, value in weights:
            mine[name].data.copy_(value)
"""
WORKER = BOTH + """
import json
from vllm.model_executor.model_loader import reload
# What these two do needs a model of vLLM's own; whether they are called around `load_weights` is seen here.
calls = []
reload.initialize_layerwise_reload = lambda model: calls.append("begin")
reload.finalize_layerwise_reload = lambda model, config: calls.append("end")
parallel = types.SimpleNamespace(world_size=1, rank=0, data_parallel_index=0)
config = types.SimpleNamespace(parallel_config=parallel, model_config=None)
model = Model(99)
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
    sums = {n: p.double().sum().item() for n, p in model.named_parameters()}
    print(json.dumps([sums, calls]), flush=True)
engine.shutdown()
"""
TRAINER = BOTH + """
import json, subprocess
worker = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
class Client:
    def say(self, word, value=None):
        worker.stdin.write(json.dumps([word, value]) + "\\n"); worker.stdin.flush()
        for line in worker.stdout:
            if line.startswith("[{"):
                self.sums, self.calls = json.loads(line)
                return
        raise AssertionError("the worker has ended")
    def init_weight_transfer_engine(self, info): self.say("init", info)
    def start_weight_update(self): self.say("start")
    def update_weights(self, info): self.say("update", info)
    def finish_weight_update(self, weight_version=None): self.say("finish")
model, client = Model(1), Client()
init = ours.CrossmeshTrainerInitInfo("127.0.0.1:" + sys.argv[1], 1, rank=0)
trainer = WeightTransferTrainerFactory.trainer_init(init, client=client, source=ModuleSource(model))
for step in range(2):
    with torch.no_grad():
        model.a.weight.add_(step)
    trainer.send_weights()
    assert client.sums == {n: p.double().sum().item() for n, p in model.named_parameters()}, client.sums
assert client.calls == ["begin", "end"] * 2
worker.stdin.close()
assert worker.wait(20) == 0
trainer.shutdown()
print("both ways")
"""


def test_a_round_trip_through_the_factories(monkeypatch):
    monkeypatch.setenv("CROSSMESH_SECRET", "a secret for a worker of vLLM")
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), str(free_port()), WORKER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and "both ways" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]
