"""A checkpoint engine of NeMo-RL: transport ``crossmesh.integrations.nemo_rl:CheckpointEngine``.

NeMo-RL makes one in every policy worker and every rollout worker, exchanges what ``prepare`` returns, and calls ``send_weights`` and
``receive_weight_batches`` for every refit. A rollout worker's first batch comes when all of a version is there and its digests hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine as Base

from .whole import Receiver, Sender, batches, meeting_place


class CheckpointEngine(Base):
    """``address``: where the policy's rank 0 listens [default: a free port of its host]. ``patience_s``: how long a refit may take."""

    def __init__(self, bucket_size: int, *, address: str | None = None, patience_s: float = 600.0, release_after_refit: bool = False) -> None:
        self._bucket_size, self._address, self._patience_s = bucket_size, address, patience_s
        self._place: dict[str, Any] | None = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None

    def prepare(self) -> dict[str, Any]:
        if self._place is None:
            self._place = meeting_place(self._address)
        return self._place

    def init_policy_process_group(self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]) -> None:
        place = metadata[0]
        self._sender = Sender(place["address"], rank=worker_rank, size=train_world_size, secret=place["secret"])

    def init_rollout_process_group(self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]) -> None:
        place = metadata[0]
        self._receiver = Receiver(place["address"], rank=rollout_rank, size=rollout_world_size, secret=place["secret"])

    def finalize(self) -> None:
        for member in (self._sender, self._receiver):
            if member is not None:
                member.close()
        self._sender = self._receiver = None

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        # The iterator gathers tensors with the other ranks: here, in the worker's own thread.
        self._sender.publish(weights)
        await asyncio.to_thread(self._sender.wait, self._patience_s)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        weights = await asyncio.to_thread(self._receiver.receive, self._patience_s)
        for batch in batches(weights, self._bucket_size):
            yield batch
        self._receiver.done()
