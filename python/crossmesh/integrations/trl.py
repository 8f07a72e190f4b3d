"""Weight transfer of TRL's AsyncGRPO to a vLLM server: ``AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(client, address, workers))``.

TRL's protocol has no base class to derive from: ``init_weight_transfer``, ``pause``, ``send_weights``, ``resume`` and ``destroy`` are called on the
main process, the iterator gathers every parameter on it. The server runs our backend (``--weight-transfer-config '{"backend": "crossmesh"}'``, see
``vllm.py``), which changes the model once all of a version has arrived; a sync that fails leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .whole import Sender


class WeightTransfer:
    """``client``: TRL's ``VLLMClient``. ``address``: where workers find the trainer. ``workers``: of the server [default: what it says]."""

    def __init__(
        self, client: Any, address: str, *, workers: int | None = None, secret: str | None = None, patience_s: float = 1800.0
    ) -> None:
        self._client, self._address, self._workers, self._secret = client, address, workers, secret
        self._patience_s, self._sender, self._told, self._version = patience_s, None, False, 0

    def init_weight_transfer(self) -> None:
        self._client.wait_for_server_ready()
        if self._workers is None:
            self._workers = self._client.get_world_size()
        self._sender = Sender(self._address, rank=0, size=1, secret=self._secret)

    def pause(self) -> None:
        self._client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self._sender.publish(iterator)
        self._version += 1
        if not self._told:
            # What there is to receive, workers hear from the trainer; it is known now.
            self._client.init_weight_transfer_engine({"address": self._address, "workers": self._workers, "patience_s": self._patience_s})
            self._told = True
        self._client.start_weight_update()
        self._client.update_weights({"version": self._version})
        self._client.finish_weight_update()
        self._sender.wait(self._patience_s)

    def resume(self) -> None:
        self._client.resume()

    def destroy(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None
