"""Adapters, driven through the factories, base classes and callers of the frameworks they are for: two trainers, two workers, bit for bit.

CI unpacks TRL without its dependencies (``frameworks.txt``), and has a stand-in for NeMo-RL's base class (``nemo_rl_standin.py``). By hand: ``pip install
--no-deps verl==0.9.1`` and what it imports, and a checkout of NeMo-RL on the path. The tests of what they share run everywhere.
"""

import asyncio
import collections
import importlib
import inspect
import json
import types
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

import pytest

torch = pytest.importorskip("torch")

import nemo_rl_standin
import trl_parts

import crossmesh as cm
from crossmesh.integrations.whole import Receiver, Sender, batches, meeting_place

SHAPES = {"embed": (7, 5), "q": (8, 6), "norm": (6,), "scale": (), "one_row": (1, 4), "experts": (3, 4, 5)}


def weights(version):
    numbers = torch.Generator().manual_seed(version)
    for index, (name, shape) in enumerate(SHAPES.items()):
        yield name, torch.randn(shape, generator=numbers).to([torch.bfloat16, torch.float32][index % 2])


def is_version(version, got):
    expected = dict(weights(version))
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], value) and got[name].dtype == value.dtype for name, value in expected.items())


def side_by_side(*calls):
    """Each in a thread, as processes would be."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


def test_tensors_that_come_one_by_one():
    place = meeting_place(None)
    senders = [Sender(**place, rank=rank, size=2) for rank in range(2)]
    receivers = [Receiver(**place, rank=rank, size=2) for rank in range(2)]

    def send(sender, version):
        sender.publish(weights(version))
        return sender.wait(30)

    def receive(receiver, version):
        got = receiver.receive(30)
        is_version(version, dict(got))
        receiver.done()

    for version in (1, 2, 3):
        calls = [lambda s=s: send(s, version) for s in senders] + [lambda r=r: receive(r, version) for r in receivers]
        times = side_by_side(*calls)[0]
        assert times["version"] == version and times["bytes_sent"] > 0
    with pytest.raises(cm.sync.SyncError, match="`stranger` was not sent the first time"):
        senders[0].publish([("stranger", torch.zeros(2))])
    for member in senders + receivers:
        member.close()


def test_what_was_offered_is_told_to_who_asks():
    secret = "a secret for who asks"
    place = meeting_place(None)["address"]
    publisher = cm.sync.Publisher(place, rank=0, size=1, secret=secret)
    with pytest.raises(cm.sync.SyncError, match="nothing was offered at"):
        cm.sync.offered(place, secret=secret, timeout_s=0.3)
    publisher.offer(dict(weights(1)))
    assert cm.sync.offered(place, secret=secret, timeout_s=20)["q"] == ("f32", [8, 6])
    publisher.forget()
    with pytest.raises(cm.sync.SyncError, match="forgotten"):
        publisher.publish(1)
    with pytest.raises(cm.sync.SyncError, match="no value of `embed` was given, nor of 5 others"):
        publisher.publish(1, values=[])
    with pytest.raises(cm.sync.SyncError, match=r"`q` was offered with shape \[8, 6\], \[2\] is published"):
        publisher.publish(1, values=[("q", torch.zeros(2))])
    publisher.close()


def test_batches_are_no_larger_than_asked():
    tensors = [(str(n), torch.zeros(n, dtype=torch.uint8)) for n in (3, 3, 9, 1, 1, 1)]
    found = [[name for name, _ in batch] for batch in batches(tensors, 6)]
    assert found == [["3", "3"], ["9"], ["1", "1", "1"]]


async def collected(batches):
    got = {}
    async for batch in batches:
        got |= {name: value.clone() for name, value in batch}
    return got


def test_nemo_rl(monkeypatch):
    """As NeMo-RL's workers do: what `prepare` says comes back to all of them, with the rank that said it."""
    try:
        base = importlib.import_module(nemo_rl_standin.NAME)
    except ImportError:
        base = nemo_rl_standin.stand_in(monkeypatch)
    backend = "crossmesh.integrations.nemo_rl:CheckpointEngine"
    options = dict(bucket_size_bytes=64, engine_kwargs={"release_after_refit": False, "patience_s": 30})
    engines = [base.create_checkpoint_engine(backend, **options) for _ in range(4)]
    metadata = [{**engine.prepare(), "rank": rank} for rank, engine in enumerate(engines)]
    sizes = dict(train_world_size=2, rollout_world_size=2, metadata=metadata)
    for rank in range(2):
        engines[rank].init_policy_process_group(worker_rank=rank, **sizes)
        engines[2 + rank].init_rollout_process_group(rollout_rank=rank, **sizes)
    for version in (1, 2):
        send = [lambda e=e: asyncio.run(e.send_weights(weights(version))) for e in engines[:2]]
        receive = [lambda e=e: asyncio.run(collected(e.receive_weight_batches())) for e in engines[2:]]
        for got in side_by_side(*send, *receive)[2:]:
            is_version(version, got)
    for engine in engines:
        engine.finalize()


def test_verl():
    base = pytest.importorskip("verl.checkpoint_engine.base", reason="verl is not installed: its engine was not tested")
    importlib.import_module("crossmesh.integrations.verl")  # as `custom_backend_module` does
    registry = base.CheckpointEngineRegistry
    engines = [registry.new("crossmesh", bucket_size=64, patience_s=30) for _ in range(4)]

    async def received(engine):
        return {name: value.clone() async for name, value in engine.receive_weights()}

    for version in (1, 2):
        metadata = [engine.prepare() for engine in engines]
        sides = registry.get("crossmesh").build_topology(2, 2, metadata)
        for side, members in zip(sides, (engines[:2], engines[2:])):
            assert all(len(values) == 2 for values in side.values())
            for rank, engine in enumerate(members):
                engine.init_process_group(**{key: values[rank] for key, values in side.items()})
        send = [lambda e=e: asyncio.run(e.send_weights(weights(version), global_steps=version)) for e in engines[:2]]
        receive = [lambda e=e: asyncio.run(received(e)) for e in engines[2:]]
        said = side_by_side(*send, *receive)
        assert "crossmesh/wire_s" in said[0]
        for got in said[2:]:
            is_version(version, got)
        for engine in engines:
            engine.finalize()
    for engine in engines:
        engine._close()


class Server(ThreadingHTTPServer):
    """What TRL's client asks of vLLM's server, with one worker behind it: ours."""

    def __init__(self):
        self.calls, self.got, self._worker = [], {}, None
        super().__init__(("127.0.0.1", 0), Request)
        Thread(target=self.serve_forever, daemon=True).start()

    def does(self, path, given):
        self.calls.append(path)
        if path == "get_world_size":
            return {"world_size": 1}
        if path == "init_weight_transfer_engine":
            self._worker = Receiver(given["init_info"]["address"], rank=0, size=given["init_info"]["workers"])
        if path == "update_weights":
            self.got = {name: value.clone() for name, value in self._worker.receive(30)}
            self._worker.done()
        return {}

    def close(self):
        self._worker.close()
        self.shutdown()
        self.server_close()


class Request(BaseHTTPRequestHandler):
    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        given = json.loads(self.rfile.read(length) or "null")
        said = json.dumps(self.server.does(urlsplit(self.path).path.strip("/"), given)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_POST = do_GET

    def log_message(self, *_):
        pass


class Model(torch.nn.Module):
    """What TRL trains: a version of the weights, and one that is frozen, which TRL does not send."""

    def __init__(self):
        super().__init__()
        for name, value in weights(1):
            self.register_parameter(name, torch.nn.Parameter(value))
        self.register_parameter("frozen", torch.nn.Parameter(torch.zeros(3), requires_grad=False))

    def becomes(self, version):
        with torch.no_grad():
            for name, value in weights(version):
                self.get_parameter(name).copy_(value)


@pytest.mark.skipif(trl_parts.folder() is None, reason="TRL is not unpacked: its trainer's calls were not made")
def test_trl(monkeypatch):
    """TRL's own client, and its trainer's own way through a sync: begin, pause, stream every parameter, resume."""
    monkeypatch.setenv("CROSSMESH_SECRET", "a secret for a server of TRL")
    from crossmesh.integrations.trl import WeightTransfer

    trl, server, model = trl_parts.parts(), Server(), Model()
    for name, theirs in vars(trl.WeightTransferProtocol).items():
        if not name.startswith("_") and inspect.isfunction(theirs):
            ours = inspect.signature(getattr(WeightTransfer, name))
            assert list(ours.parameters) == list(inspect.signature(theirs).parameters), name

    class Trainer(trl.AsyncGRPOTrainer):
        """Of its state, what a sync uses."""

        accelerator = types.SimpleNamespace(
            is_main_process=True, device=torch.device("cpu"), unwrap_model=lambda model: model, wait_for_everyone=lambda: None
        )
        weight_transfer = WeightTransfer(trl.VLLMClient(f"http://127.0.0.1:{server.server_port}"), meeting_place(None)["address"], patience_s=30)
        rollout_worker, _lora_sync, model_version = None, False, 0
        _metrics = {"train": collections.defaultdict(list)}

    trainer = Trainer()
    trainer.model = model
    begins = trl._TrainBeginCallback(trainer)
    for version in (1, 2):
        model.becomes(version)
        begins.on_train_begin(None, None, None) if version == 1 else trainer._sync_weight()
        is_version(version, server.got)
        assert trainer.model_version == version
    trainer.weight_transfer.destroy()
    update = ["start_weight_update", "update_weights", "finish_weight_update", "resume"]
    assert server.calls == ["health", "get_world_size", "pause", "init_weight_transfer_engine", *update, "pause", *update]
    server.close()
