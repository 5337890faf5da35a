"""Encryption of what follows a greeting: sealed records over a TCP stream. Same-host Unix sockets stay in clear.

The nonces of the greeting are fresh X25519 public keys, so their proofs also prove the key exchange; each direction
gets a key of its own from the secret, the exchange and everything said. A record is `length u32le, AES-256-GCM of at
most 64 KiB`, its nonce the number of the record: one that is changed, repeated, dropped or moved fails and ends the
stream. Who records the traffic and later learns the secret can read none of it.

Needs `cryptography` (`pip install headwater[secure]`).
"""

import importlib.util
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from headwater.errors import ConfigError, PeerLost

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAX_PLAIN_BYTES = 64 << 10
_TAG_BYTES = 16
_HEADER_BYTES = 4


def check_available() -> None:
    """Raises `ConfigError`."""
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError("encrypted transfers need `cryptography`", hint="pip install headwater[secure]")


class Exchange:
    """One side's half of a key exchange; `public` serves as its nonce."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def keys(self, theirs: bytes, secret: bytes, *said: bytes) -> "SealKeys":
        """Raises `PeerLost` for a public key that is none."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError:
            raise PeerLost("the peer broke the protocol: no key to agree on") from None
        root = blake2b(key=blake2b(secret, person=b"headwater-key").digest(), person=b"headwater-seal")
        for part in (shared, *said):
            root.update(len(part).to_bytes(8, "little") + part)
        return SealKeys(*(blake2b(side, key=root.digest(), digest_size=32).digest() for side in (b"c", b"a")))


@dataclass(frozen=True, slots=True)
class SealKeys:
    connects: bytes
    """For what the side that connects sends."""
    accepts: bytes


class Sealer:
    """Plain bytes to records, in order."""

    def __init__(self, key: bytes) -> None:
        self._cipher = _cipher(key)
        self._number = 0

    def seal(self, plain: bytes | bytearray | memoryview) -> bytes:
        """Of at most `MAX_PLAIN_BYTES`."""
        body = self._cipher.encrypt(_nonce(self._number), plain, None)
        self._number += 1
        return len(body).to_bytes(_HEADER_BYTES, "little") + body

    def seal_all(self, plain: bytes) -> bytes:
        pieces = range(0, len(plain), MAX_PLAIN_BYTES)
        return b"".join([self.seal(plain[at : at + MAX_PLAIN_BYTES]) for at in pieces])


class Opener:
    """Records to plain bytes, in order. Raises `PeerLost` for any that is not the next one, unharmed."""

    def __init__(self, key: bytes) -> None:
        self._cipher = _cipher(key)
        self._number = 0
        self._buffer = bytearray(_HEADER_BYTES + MAX_PLAIN_BYTES + _TAG_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0

    @property
    def is_empty(self) -> bool:
        return not self._filled

    def space(self) -> memoryview:
        """Where the next bytes of the present record belong."""
        end = _HEADER_BYTES if self._filled < _HEADER_BYTES else _HEADER_BYTES + self._length()
        return self._view[self._filled : end]

    def fill(self, num_bytes: int) -> bytes | None:
        """So many bytes were put into `space`; the record, if it is complete."""
        self._filled += num_bytes
        if self._filled <= _HEADER_BYTES or self._filled < _HEADER_BYTES + self._length():
            return None
        plain = self._open(self._view[_HEADER_BYTES : self._filled])
        self._filled = 0
        return plain

    def open_all(self, data: bytes) -> Iterator[bytes]:
        """All records that are complete with this."""
        rest = memoryview(data)
        while rest:
            space = self.space()
            size = min(len(space), len(rest))
            space[:size] = rest[:size]
            rest = rest[size:]
            plain = self.fill(size)
            if plain is not None:
                yield plain

    def _length(self) -> int:
        length = int.from_bytes(self._buffer[:_HEADER_BYTES], "little")
        if not _TAG_BYTES < length <= MAX_PLAIN_BYTES + _TAG_BYTES:
            raise PeerLost("the peer broke the protocol: not a sealed record")
        return length

    def _open(self, record: memoryview) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            plain = self._cipher.decrypt(_nonce(self._number), record, None)
        except InvalidTag:
            raise PeerLost("what came was not sealed by the peer, or was changed on its way") from None
        self._number += 1
        return plain


class SealedSocket:
    """As much of a blocking socket as streams need, sealed. Used by one thread at a time."""

    def __init__(self, sock: socket.socket, sealer: Sealer, opener: Opener) -> None:
        self._sock = sock
        self._sealer = sealer
        self._opener = opener
        self._unsent = memoryview(b"")
        self._unsent_plain = 0
        self._plain = memoryview(b"")

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        """As of a socket; after `BlockingIOError` the same views must come again."""
        if not self._unsent:
            plain = _gathered(views)
            self._unsent, self._unsent_plain = memoryview(self._sealer.seal(plain)), len(plain)
        while self._unsent:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        return self._unsent_plain

    def recvmsg_into(self, views: Sequence[memoryview], _ancillary: int, _flags: int) -> tuple[int]:
        """As of a socket: how many bytes came; 0 at its end."""
        while not self._plain:
            got = self._sock.recv_into(self._opener.space(), 0, socket.MSG_WAITALL)
            if not got:
                return (0,)
            self._plain = memoryview(self._opener.fill(got) or b"")
        return (self._scatter(views),)

    def _scatter(self, views: Sequence[memoryview]) -> int:
        moved = 0
        for view in views:
            size = min(len(view), len(self._plain))
            view[:size] = self._plain[:size]
            self._plain = self._plain[size:]
            moved += size
            if not self._plain:
                break
        return moved

    @property
    def family(self) -> int:
        return self._sock.family

    def fileno(self) -> int:
        return self._sock.fileno()

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._sock.setsockopt(level, option, value)

    def setblocking(self, flag: bool) -> None:
        self._sock.setblocking(flag)

    def settimeout(self, timeout_s: float | None) -> None:
        self._sock.settimeout(timeout_s)

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


StreamSocket = socket.socket | SealedSocket


def _gathered(views: Sequence[memoryview]) -> bytes | memoryview:
    """The first bytes of `views`, as many as fit into a record."""
    if len(views[0]) >= MAX_PLAIN_BYTES:
        return views[0][:MAX_PLAIN_BYTES]
    left, pieces = MAX_PLAIN_BYTES, []
    for view in views:
        pieces.append(view[:left])
        left -= len(pieces[-1])
        if not left:
            break
    return b"".join(pieces)


def _cipher(key: bytes) -> "AESGCM":
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")
