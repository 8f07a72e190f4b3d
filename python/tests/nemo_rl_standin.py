"""A stand-in for NeMo-RL's ``nemo_rl.utils.checkpoint_engines.base``, in our words: PyPI has only a placeholder of that name.

It has the abstract methods, their parameters and the way an engine is made, as NeMo-RL's main branch had them in autumn 2026, and nothing else of it. With a
checkout of NeMo-RL on the path, the test takes that one.
"""

import importlib
import sys
import types
from abc import ABC, abstractmethod

NAME = "nemo_rl.utils.checkpoint_engines.base"


class CheckpointEngine(ABC):
    cleanup_after_load = True
    shard_hf_weights = False

    @abstractmethod
    def prepare(self): ...

    @abstractmethod
    def init_policy_process_group(self, *, worker_rank, train_world_size, rollout_world_size, metadata): ...

    @abstractmethod
    def init_rollout_process_group(self, *, rollout_rank, train_world_size, rollout_world_size, metadata): ...

    @abstractmethod
    async def send_weights(self, weights): ...

    @abstractmethod
    def receive_weight_batches(self): ...

    def finalize(self):
        pass


def create_checkpoint_engine(backend, *, bucket_size_bytes, engine_kwargs):
    module, name = backend.split(":")
    return getattr(importlib.import_module(module), name)(bucket_size=bucket_size_bytes, **engine_kwargs)


def stand_in(monkeypatch):
    """This module under NeMo-RL's name, until the test ends."""
    parts = NAME.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, NAME, sys.modules[__name__])
    monkeypatch.delitem(sys.modules, "crossmesh.integrations.nemo_rl", raising=False)
    return sys.modules[__name__]
