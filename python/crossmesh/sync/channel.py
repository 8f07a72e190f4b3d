"""Words between members and the roll call: JSON, with a length, on a connection whose two ends have proven that they know the secret.

Tensors never come this way.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import threading

from .. import CrossmeshError

_LONGEST = 1 << 28  # a roll call of a large model: a hundred thousand boxes with their names
_PROOF_S = 5.0


class SyncError(CrossmeshError):
    """Why weights were not published or installed."""


def secret_of(secret: str | None) -> bytes:
    """The secret that was given, or that the environment holds."""
    path = os.environ.get("CROSSMESH_SECRET_FILE")
    if secret is None:
        secret = os.environ.get("CROSSMESH_SECRET")
    if secret is None and path:
        with open(path, encoding="utf-8") as file:
            secret = file.read()
    if secret is None or len(secret.strip()) < 16:
        raise SyncError("no secret of 16 characters or more\nhint: give `secret=`, or set CROSSMESH_SECRET for both jobs")
    return secret.strip().encode()


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SyncError(f"address={address} is not HOST:PORT, such as 10.0.0.1:7000")
    return host.strip("[]"), int(port)


def derive(secret: bytes, what: str) -> str:
    """Another secret, for the job of one epoch."""
    return hmac.new(secret, f"crossmesh sync {what}".encode(), hashlib.sha256).hexdigest()


class Channel:
    """One end of a connection. Sending is safe from any thread."""

    def __init__(self, stream: socket.socket, secret: bytes, side: str) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(_PROOF_S)
        self._stream, self._sending = stream, threading.Lock()
        self._prove(secret, side)
        stream.settimeout(None)

    def _prove(self, secret: bytes, side: str) -> None:
        """Each end proves that it knows the secret, for the nonce of the other; neither proof can be sent back as its own."""
        mine = os.urandom(32)
        self._stream.sendall(mine)
        theirs = self._exactly(32)
        proof = lambda who: hmac.new(secret, who.encode() + mine_first(who), hashlib.sha256).digest()  # noqa: E731

        def mine_first(who: str) -> bytes:
            return mine + theirs if who == side else theirs + mine

        self._stream.sendall(proof(side))
        other = "member" if side == "roll call" else "roll call"
        if not hmac.compare_digest(self._exactly(32), proof(other)):
            self.close()
            raise ConnectionError("the other end does not know the secret")

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._stream.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise ConnectionError("the connection has ended")
            parts += part
        return bytes(parts)

    def send(self, word: str, **values) -> None:
        text = json.dumps({"word": word, **values}).encode()
        with self._sending:
            self._stream.sendall(struct.pack("<I", len(text)) + text)

    def receive(self, timeout_s: float | None = None) -> dict:
        """The next word. A peer that is silent for so long is taken for gone."""
        self._stream.settimeout(timeout_s)
        (length,) = struct.unpack("<I", self._exactly(4))
        if length > _LONGEST:
            raise ConnectionError(f"a message of {length} bytes")
        return json.loads(self._exactly(length))

    def close(self) -> None:
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._stream.close()
