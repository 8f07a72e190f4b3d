"""Words between members and the roll call: JSON on a connection whose two ends have proven that they know the secret.

::

    nonce, proof                     both ways: each proves that it knows the secret, for the nonce of the other
    length, tag | text, tag          a word: HMAC-SHA256, 16 bytes, with a key of this connection and this direction, over a counter and what it is the tag of

So nobody on the way can change a word, say one twice, leave one out or swap two without being found out; whoever listens reads them: tensors' names,
shapes and digests. Tensors never come this way.
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
_TAG_BYTES = 16


class SyncError(CrossmeshError):
    """Why weights were not published or installed."""


class WrongSecret(ConnectionError):
    """The other end has another secret."""


class Forged(ConnectionError):
    """A word that the other end has not said, not so, or not now."""


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
    return _hmac(secret, f"crossmesh sync {what}".encode()).hex()


class Channel:
    """One end of a connection. Sending is safe from any thread."""

    def __init__(self, stream: socket.socket, secret: bytes, side: str) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(_PROOF_S)
        self._stream, self._sending = stream, threading.Lock()
        other = "member" if side == "roll call" else "roll call"
        nonces = self._prove(secret, side, other)
        self._says, self._hears = (_Tags(secret, who, nonces) for who in (side, other))
        stream.settimeout(None)

    def _prove(self, secret: bytes, side: str, other: str) -> bytes:
        """Each end proves that it knows the secret, for the nonce of the other; neither proof can be sent back as its own. Returns both nonces."""
        mine = os.urandom(32)
        self._stream.sendall(mine)
        theirs = self._exactly(32)
        # A proof begins with the nonce of who proves.
        proof = lambda who: _hmac(secret, who.encode() + (mine + theirs if who == side else theirs + mine))  # noqa: E731
        self._stream.sendall(proof(side))
        if not hmac.compare_digest(self._exactly(32), proof(other)):
            self.close()
            raise WrongSecret("the other end does not know the secret")
        return mine + theirs if side == "member" else theirs + mine

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._stream.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise ConnectionError("the connection has ended")
            parts += part
        return bytes(parts)

    def fileno(self) -> int:
        """What can be read when a word is there."""
        return self._stream.fileno()

    def send(self, word: str, **values) -> None:
        text = json.dumps({"word": word, **values}).encode()
        length = struct.pack("<I", len(text))
        with self._sending:
            self._stream.sendall(length + self._says.next(length) + text + self._says.next(text))

    def receive(self, timeout_s: float | None = None) -> dict:
        """The next word. A peer that is silent for so long is taken for gone."""
        self._stream.settimeout(timeout_s)
        # The length has a tag of its own: nobody waits for bytes, or makes room for them, that were not announced by the other end.
        head = self._signed(4)
        (length,) = struct.unpack("<I", head)
        if length > _LONGEST:
            raise ConnectionError(f"a message of {length} bytes")
        return json.loads(self._signed(length))

    def _signed(self, count: int) -> bytes:
        said = self._exactly(count + _TAG_BYTES)
        data, tag = said[:count], said[count:]
        number = self._hears.said // 2
        if not hmac.compare_digest(tag, self._hears.next(data)):
            self.close()
            raise Forged(f"word {number} on its connection is not what the other end said there: it was changed, repeated or left out on the way; the connection is closed")
        return data

    def close(self) -> None:
        """Ends the connection, from any thread: whoever reads from it hears of it. Its descriptor goes with the last who has it, and means nothing else before."""
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it had ended


class _Tags:
    """Of what one end of a connection says, in turn."""

    def __init__(self, secret: bytes, who: str, nonces: bytes) -> None:
        self._key, self.said = _hmac(secret, f"crossmesh sync, words of the {who}".encode() + nonces), 0

    def next(self, data: bytes) -> bytes:
        tag = _hmac(self._key, struct.pack("<Q", self.said) + data)[:_TAG_BYTES]
        self.said += 1
        return tag


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()
