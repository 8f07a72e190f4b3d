"""A weight transfer backend of vLLM: ``vllm serve M --weight-transfer-config '{"backend": "crossmesh"}'``.

The package registers it by the entry point ``vllm.general_plugins``, which every worker of vLLM loads. On the trainer's side::

    init = CrossmeshTrainerInitInfo("h0:7000", workers=8, rank=rank, size=world_size)
    trainer = WeightTransferTrainerFactory.trainer_init(init, client=client, source=ModuleSource(model))
    trainer.send_weights()

A worker receives all of a version into memory of its own, holds it against the digests, and touches the model in ``finish_weight_update``,
by its own ``load_weights``: a transfer that fails leaves the model as it was. Which rows and columns of every checkpoint tensor a worker wants is
found by watching its loaders once (``loaders.py``); only these travel. Where that cannot be told, as of quantized models, tensors travel whole,
and a line in the log says so. A module's DTensors are published as the shards they are.
"""

from __future__ import annotations

import logging
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

from .. import Layout, Mesh
from ..sync import Publisher, Subscriber, SyncError, offered
from .loaders import Box, Watched, read_by

BACKEND = "crossmesh"
logger = logging.getLogger("crossmesh")
# The notation's words for what torch calls otherwise.
_TORCH_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
_TORCH_NAMES |= {"i8": "int8", "i32": "int32", "i64": "int64", "u8": "uint8", "bool": "bool"}


def register() -> None:
    """What the entry point calls; again does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, engine in ((WeightTransferEngineFactory, "CrossmeshEngine"), (WeightTransferTrainerFactory, "CrossmeshTrainer")):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, __name__, engine)


@dataclass
class CrossmeshInitInfo(WeightTransferInitInfo):
    """Where to meet, and how many workers there are, of all engines. ``slices``: only what a worker's loaders read is received."""

    address: str
    workers: int
    patience_s: float = 300.0
    slices: bool = True


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
    slices: bool = field(default=True, kw_only=True)


class CrossmeshEngine(WeightTransferEngine[CrossmeshInitInfo, CrossmeshUpdateInfo]):
    """A worker's side."""

    init_info_cls = CrossmeshInitInfo
    update_info_cls = CrossmeshUpdateInfo

    def init_transfer_engine(self, init_info: CrossmeshInitInfo) -> None:
        config = self.parallel_config
        self._rank = getattr(config, "data_parallel_index", 0) * config.world_size + config.rank
        self._info, self._subscriber, self._whole = init_info, None, None

    def _join(self) -> None:
        """What is published is known once the trainers are there."""
        info = self._info
        self._about = offered(info.address, timeout_s=info.patience_s)
        everything = {name: [(0, n) for n in shape] for name, (_, shape) in self._about.items()}
        self._boxes = self._read() if info.slices else None
        self._boxes = self._boxes or everything
        into, layouts, mesh = {}, {}, Mesh("W", worker=info.workers, ranks=range(info.workers))
        for name, box in self._boxes.items():
            if all(a < b for a, b in box):
                dtype, shape = self._about[name]
                into[name] = (dtype, tuple(b - a for a, b in box))
                layouts[name] = Layout(dtype, shape, mesh, [None] * len(shape))
                if box != everything[name]:
                    layouts[name] = Layout.parse(f"{dtype}[{','.join(map(str, shape))}]@{mesh}{{{self._rank}: {_written(box)}}}")
        self._subscriber = Subscriber(info.address, into, layouts, rank=self._rank, size=info.workers)

    def _read(self) -> dict[str, Box] | None:
        about = {name: (getattr(torch, _TORCH_NAMES.get(dtype, dtype)), shape) for name, (dtype, shape) in self._about.items()}
        try:
            return read_by(self.model.load_weights, about)
        except SyncError as error:
            logger.warning("tensors travel whole to worker %d: %s", self._rank, error)
            return None

    def start_weight_update(self) -> None:
        """Nothing of the model is touched before everything has arrived."""
        self._whole = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: CrossmeshUpdateInfo) -> None:
        if self._subscriber is None:
            self._join()
        if not self._subscriber.poll(self._info.patience_s):
            raise SyncError(f"version {update_info.version} has not come within {self._info.patience_s} s")
        self._check(update_info.version)
        self._whole = update_info.version

    def _check(self, announced: int) -> None:
        """That what is ready is what was announced, while the model is still as it was."""
        if self._subscriber.ready != announced:
            raise SyncError(
                f"version {announced} was announced, {self._subscriber.ready} is ready; the model is as it was\n"
                "hint: announce the version that was published last, to all workers"
            )

    def finish_weight_update(self) -> None:
        if self._whole is None:
            raise SyncError("no version has arrived\nhint: `update_weights` receives one")
        announced, self._whole = self._whole, None
        self._check(announced)
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        with Watched(self._boxes) as watched:
            self.model.load_weights(self._weights(watched))
            finalize_layerwise_reload(self.model, self.model_config)
        self._subscriber.install()

    def _weights(self, watched: Watched) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors as the loaders know them: of what is not read here nothing is filled, and no memory taken on a host."""
        staged = self._subscriber.staged
        for name, (dtype, shape) in self._about.items():
            box = self._boxes[name]
            if name not in staged:
                continue
            part = torch.from_dlpack(staged[name])
            if list(part.shape) == list(shape):
                yield name, part.to(self.device, copy=True)
                continue
            tensor = torch.empty(shape, dtype=part.dtype, device=self.device)
            tensor[tuple(slice(a, b) for a, b in box)].copy_(part)
            yield name, watched.add(name, tensor)

    def shutdown(self) -> None:
        if getattr(self, "_subscriber", None) is not None:
            self._subscriber.close()


def _written(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in box) + "]"


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
            info = dict(address=init_info.address, workers=init_info.workers, patience_s=init_info.patience_s, slices=init_info.slices)
            client.init_weight_transfer_engine(info)
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
