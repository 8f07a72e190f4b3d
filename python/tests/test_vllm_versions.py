"""Which version a worker of vLLM loads, with stand-ins for vLLM and for the subscriber: what was announced, or nothing and the model as it was."""

import importlib
import sys
import types
from dataclasses import dataclass

import pytest

pytest.importorskip("torch", reason="torch is not installed: vLLM's backend was not tested")

import crossmesh as cm  # noqa: E402


class Base:
    def __class_getitem__(cls, _):
        return cls


@dataclass
class Info:
    pass


@pytest.fixture
def backend(monkeypatch):
    """The adapter, with as much of vLLM as its import asks for."""
    names = ("ModuleSource", "TrainerWeightTransferEngine", "WeightTransferEngine")
    base = {name: type(name, (Base,), {}) for name in names}
    base |= {name: type(name, (Info,), {}) for name in ("TrainerInitInfo", "WeightTransferInitInfo", "WeightTransferUpdateInfo")}
    reload = {"initialize_layerwise_reload": lambda model: model.calls.append("begin"), "finalize_layerwise_reload": lambda *_: None}
    modules = {"vllm.distributed.weight_transfer.base": base, "vllm.model_executor.model_loader.reload": reload}
    for name, contents in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "crossmesh.integrations.vllm", raising=False)
    yield importlib.import_module("crossmesh.integrations.vllm")
    sys.modules.pop("crossmesh.integrations.vllm", None)


class Subscriber:
    """Has a version ready."""

    def __init__(self, ready):
        self.ready, self.staged, self.installed = ready, {}, None

    def poll(self, timeout_s):
        return self.ready is not None

    def install(self):
        self.installed, self.ready = self.ready, None
        return self.installed


class Model:
    def __init__(self):
        self.calls = []

    def load_weights(self, weights):
        self.calls.append(("load", list(weights)))


def engine_of(backend, ready):
    engine = backend.CrossmeshEngine.__new__(backend.CrossmeshEngine)
    engine._info, engine._subscriber, engine._whole = backend.CrossmeshInitInfo("h:1", 1), Subscriber(ready), None
    engine._about, engine._boxes, engine.model, engine.model_config = {}, {}, Model(), None
    return engine


def test_the_announced_version_is_loaded_and_installed(backend):
    engine = engine_of(backend, 3)
    engine.receive_weights(backend.CrossmeshUpdateInfo(3))
    assert engine.model.calls == []
    engine.finish_weight_update()
    assert engine.model.calls == ["begin", ("load", [])] and engine._subscriber.installed == 3


@pytest.mark.parametrize("ready", [2, 4])
def test_another_version_is_refused_before_the_model_is_touched(backend, ready):
    engine = engine_of(backend, ready)
    with pytest.raises(cm.sync.SyncError, match=f"version 3 was announced, {ready} is ready; the model is as it was"):
        engine.receive_weights(backend.CrossmeshUpdateInfo(3))
    with pytest.raises(cm.sync.SyncError, match="no version has arrived"):
        engine.finish_weight_update()
    assert engine.model.calls == [] and engine._subscriber.installed is None
    # The announced one may still come.
    engine._subscriber.ready = 3
    engine.receive_weights(backend.CrossmeshUpdateInfo(3))
    engine.finish_weight_update()
    assert engine._subscriber.installed == 3


def test_a_version_that_was_given_up_meanwhile_is_not_loaded(backend):
    """Between the two calls the roll call may take it back."""
    engine = engine_of(backend, 3)
    engine.receive_weights(backend.CrossmeshUpdateInfo(3))
    engine._subscriber.ready = None
    with pytest.raises(cm.sync.SyncError, match="3 was announced, None is ready"):
        engine.finish_weight_update()
    assert engine.model.calls == []
