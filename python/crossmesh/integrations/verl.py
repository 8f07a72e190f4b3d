"""A checkpoint engine of verl: ``checkpoint_engine.backend=crossmesh``, ``custom_backend_module=crossmesh.integrations.verl``.

verl makes one in every actor and every rollout worker, and for every sync calls ``prepare``, ``build_topology`` with what all of them
returned, ``init_process_group``, then ``send_weights`` and ``receive_weights``, then ``finalize``. Members stay connected between syncs as long
as the topology stays what it is. A rollout worker's first tensor comes when all of a version is there and its digests hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from .whole import Receiver, Sender, meeting_place


@CheckpointEngineRegistry.register("crossmesh")
class CrossmeshCheckpointEngine(CheckpointEngine):
    """``address``: where the actor's rank 0 listens [default: a free port of its host]. ``patience_s``: how long a sync may take."""

    def __init__(self, bucket_size: int, *, address: str | None = None, patience_s: float = 600.0, is_master: bool = False) -> None:
        self._address, self._patience_s = address, patience_s
        self._place: dict[str, Any] | None = None
        self._topology: dict[str, Any] | None = None
        self._member: Sender | Receiver | None = None

    def prepare(self) -> dict[str, Any]:
        if self._place is None:
            self._place = meeting_place(self._address)
        return self._place

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        place = metadata[0]  # actors come first

        def of(side: str, size: int) -> dict[str, list[Any]]:
            return {"side": [side] * size, "rank": list(range(size)), "size": [size] * size} | {key: [place[key]] * size for key in place}

        return of("actor", actor_wg_world_size), of("rollout", rollout_world_size)

    def init_process_group(self, **topology: Any) -> None:
        if topology == self._topology:
            return
        self._close()
        made = Sender if topology["side"] == "actor" else Receiver
        self._member = made(topology["address"], rank=topology["rank"], size=topology["size"], secret=topology["secret"])
        self._topology = topology

    def finalize(self) -> None:
        """Nothing of a sync is left: its memory is the next one's."""

    def _close(self) -> None:
        if self._member is not None:
            self._member.close()
        self._member = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, Any]:
        # The iterator gathers tensors with the other actors: here, in the worker's own thread.
        self._member.publish(weights)
        times = await asyncio.to_thread(self._member.wait, self._patience_s)
        return {f"crossmesh/{stage}": value for stage, value in times.items() if stage.endswith("_s")}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        for item in await asyncio.to_thread(self._member.receive, self._patience_s):
            yield item
        self._member.done()
