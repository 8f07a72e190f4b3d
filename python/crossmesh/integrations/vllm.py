"""A weight transfer backend of vLLM: ``vllm serve M --weight-transfer-config '{"backend": "crossmesh"}'``.

The package registers it by the entry point ``vllm.general_plugins``, which every worker of vLLM loads. On the trainer's side::

    init = CrossmeshTrainerInitInfo("h0:7000", workers=8, rank=rank, size=world_size)
    trainer = WeightTransferTrainerFactory.trainer_init(init, client=client, source=ModuleSource(model))
    trainer.send_weights()

A worker receives all of a version into memory of its own, holds it against the digests, and touches the model in ``finish_weight_update``,
by its own ``load_weights``: a transfer that fails leaves the model as it was. Parameters travel whole to every worker, under the names of
checkpoints, so that any model's loader does; a module's DTensors are published as the shards they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ..sync import Publisher, Subscriber, SyncError

BACKEND = "crossmesh"


def register() -> None:
    """What the entry point calls; again does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, engine in ((WeightTransferEngineFactory, "CrossmeshEngine"), (WeightTransferTrainerFactory, "CrossmeshTrainer")):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, __name__, engine)


@dataclass
class CrossmeshInitInfo(WeightTransferInitInfo):
    """Where to meet, how many workers there are, and what is published: names, dtypes and shapes."""

    address: str
    workers: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    patience_s: float = 300.0


@dataclass
class CrossmeshUpdateInfo(WeightTransferUpdateInfo):
    version: int


@dataclass
class CrossmeshTrainerInitInfo(TrainerInitInfo):
    """``address``: of the trainer's rank 0. ``workers``: of all vLLM engines together."""

    backend: ClassVar[str] = BACKEND

    address: str
    workers: int
    size: int = field(default=1, kw_only=True)
    patience_s: float = field(default=300.0, kw_only=True)


class CrossmeshEngine(WeightTransferEngine[CrossmeshInitInfo, CrossmeshUpdateInfo]):
    """A worker's side."""

    init_info_cls = CrossmeshInitInfo
    update_info_cls = CrossmeshUpdateInfo

    def init_transfer_engine(self, init_info: CrossmeshInitInfo) -> None:
        config = self.parallel_config
        rank = getattr(config, "data_parallel_index", 0) * config.world_size + config.rank
        about = zip(init_info.names, init_info.dtype_names, init_info.shapes, strict=True)
        self._received = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in about}
        self._patience_s, self._whole = init_info.patience_s, None
        self._subscriber = Subscriber(init_info.address, self._received, rank=rank, size=init_info.workers)

    def start_weight_update(self) -> None:
        """Nothing of the model is touched before everything has arrived."""
        self._whole = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: CrossmeshUpdateInfo) -> None:
        if not self._subscriber.poll(self._patience_s):
            raise SyncError(f"version {update_info.version} has not come within {self._patience_s} s")
        self._whole = self._subscriber.install()
        if self._whole != update_info.version:
            raise SyncError(f"version {update_info.version} was announced, {self._whole} came")

    def finish_weight_update(self) -> None:
        if self._whole is None:
            raise SyncError("no version has arrived\nhint: `update_weights` receives one")
        self._whole = None
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self.model.load_weights(self._weights())
        finalize_layerwise_reload(self.model, self.model_config)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self._received.items():
            yield name, value.to(self.device)

    def shutdown(self) -> None:
        self._subscriber.close()


class CrossmeshTrainer(TrainerWeightTransferEngine[CrossmeshTrainerInitInfo]):
    """A trainer rank's side."""

    init_info_cls = CrossmeshTrainerInitInfo

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        if source is None:
            raise SyncError("no source of weights was given\nhint: source=ModuleSource(model)")
        made = cls(client=client, source=source, is_sender=init_info.is_sender)
        made._version, made._patience_s = 0, init_info.patience_s
        made._publisher = Publisher(init_info.address, rank=init_info.rank, size=init_info.size)
        # A module's parameters are published from where they are; what a source makes anew every time, from copies.
        module = source._module if type(source) is ModuleSource else None
        made._copies = None if module else {m.name: torch.empty(m.shape, dtype=m.dtype) for m in source.metadata()}
        made._publisher.offer(dict(module.named_parameters()) if module else made._copies)
        if made.is_sender:
            about = source.metadata()
            info = dict(address=init_info.address, workers=init_info.workers, patience_s=init_info.patience_s)
            info |= dict(names=[m.name for m in about], dtype_names=[str(m.dtype).split(".")[-1] for m in about])
            client.init_weight_transfer_engine(info | {"shapes": [list(m.shape) for m in about]})
        return made

    def send_weights(self) -> None:
        if self._copies is not None:
            for name, tensor in self.source:
                self._copies[name].copy_(tensor)
        self._version += 1
        self._publisher.publish(self._version)
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"version": self._version})
            self.client.finish_weight_update()
        self._publisher.wait(self._version, self._patience_s)

    def shutdown(self) -> None:
        self._publisher.close()
