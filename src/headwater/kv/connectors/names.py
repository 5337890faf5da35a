"""Names of blocks, from a worker to the store's connector in the processes of its engine.

For engines that give their plug-ins no more of a request than a key: SGLang the hashes of its pages, TensorRT-LLM the
cache salt. The worker writes what stands behind a key into a log in a folder of its own, before the engine gets the
request; a connector reads what is new there when it meets a key that it does not know. Nobody waits for anybody.

It says what computing costs, too, which loads are weighed against.

A log is begun anew once it has so many keys; of the one before, readers keep what they have read. What is forgotten on
both sides is told again with the next request, and until then the engine computes.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from math import isclose
from pathlib import Path
from typing import NamedTuple

import msgspec

from headwater.errors import ProtocolError
from headwater.kv.connectors.naming import Naming
from headwater.kv.pricing import ComputeRate
from headwater.types import BLOCK_ID_BYTES

_log = logging.getLogger(__name__)

KEY_BYTES = 32
MAX_KEYS = 1 << 17
_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 1 << 26
_LOOK_AGAIN_S = 0.02
_USUAL = (1000, 1000)
_NEWS = 0.1
"""Rates are compared by what some tokens after some others cost."""


class _Run(msgspec.Struct, array_like=True, tag="names"):
    """Keys of one request, in order."""

    naming: Naming
    keys: bytes
    ids: bytes


class _Rate(msgspec.Struct, array_like=True, tag="rate"):
    rate: ComputeRate


class Named(NamedTuple):
    block_id: bytes
    """Empty where the key stands for a request and not for a block."""
    naming: Naming


class NameLog:
    """The worker's side."""

    def __init__(self, path: Path, max_keys: int = MAX_KEYS) -> None:
        self._path, self._max_keys = path, max_keys
        self._told: dict[bytes, str] = {}
        """Tenants by key, of this log."""
        self._rate: ComputeRate | None = None
        self._problem = ""
        self._broken = False
        self._fd = self._begin()

    def tell(self, naming: Naming, keys: Sequence[bytes], ids: bytes = b"") -> None:
        """`ids`: of the blocks behind the keys, joined, or none."""
        size = BLOCK_ID_BYTES if ids else 0
        new = [number for number, key in enumerate(keys) if self._told.get(key) != naming.tenant]
        if not new:
            return
        run = _Run(
            naming,
            b"".join(keys[number] for number in new),
            b"".join(ids[number * size : (number + 1) * size] for number in new),
        )
        if self._tell(run, len(new)):
            self._told.update((keys[number], naming.tenant) for number in new)

    def price(self, rate: ComputeRate) -> None:
        """What computing costs; told if it is news."""
        if self._rate is None or not isclose(rate.prefill_ms(*_USUAL), self._rate.prefill_ms(*_USUAL), rel_tol=_NEWS):
            self._rate = rate
            self._tell(_Rate(rate), 0)

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink(missing_ok=True)

    def _tell(self, what: _Run | _Rate, num_keys: int) -> bool:
        try:
            if self._broken or len(self._told) + num_keys > self._max_keys:
                fresh = self._begin()
                os.close(self._fd)
                self._fd, self._broken = fresh, False
                if self._rate is not None:
                    self._write(msgspec.msgpack.encode(_Rate(self._rate)))
            self._write(msgspec.msgpack.encode(what))
        except OSError as error:
            self._note(error)
            return False
        return True

    def _begin(self) -> int:
        """In the place of the one before: who has that open goes on reading it to its end."""
        self._told.clear()
        fresh = self._path.with_suffix(".new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.replace(fresh, self._path)
        return fd

    def _write(self, frame: bytes) -> None:
        left = memoryview(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)
        while left:
            left = left[os.write(self._fd, left) :]

    def _note(self, error: OSError) -> None:
        """What is half written ends this log."""
        self._broken = True
        if str(error) != self._problem:
            self._problem = str(error)
            _log.warning("blocks for the KV store cannot be named, and are not kept: %s", error)


class NamesTold:
    """The connector's side. May be used from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd = -1
        self._inode = 0
        self._rest = b""
        """Of a frame that is not whole yet."""
        self._rate: ComputeRate | None = None
        self._found: dict[bytes, Named] = {}
        self._before: dict[bytes, Named] = {}
        self._problem = ""

    def find(self, key: bytes) -> Named | None:
        known = self._known(key)
        if known is None:
            self._read()
            known = self._known(key)  # also if another thread has read it just now
        return known

    def leading(self, keys: Sequence[bytes], wait_s: float = 0.0) -> list[Named]:
        """Of the first keys, as far as they are known and of one naming. `wait_s`: for what is being told."""
        until = time.monotonic() + wait_s
        while True:
            found: list[Named] = []
            for key in keys:
                named = self.find(key)
                if named is None or (found and named.naming != found[0].naming):
                    break
                found.append(named)
            if len(found) == len(keys) or time.monotonic() >= until:
                return found
            time.sleep(_LOOK_AGAIN_S)

    def rate(self) -> ComputeRate | None:
        """What computing costs by now; None: nothing was said of it."""
        self._read()
        return self._rate

    def close(self) -> None:
        with self._lock:
            self._open(-1, 0)

    def _known(self, key: bytes) -> Named | None:
        return self._found.get(key) or self._before.get(key)

    def _read(self) -> None:
        """What is new."""
        with self._lock:
            try:
                self._read_on()
                inode = self._path.stat().st_ino
                if inode != self._inode:
                    self._open(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC), inode)
                    self._before, self._found = self._found, {}
                    self._read_on()
            except ProtocolError as error:
                self._open(-1, self._inode)  # not read any further: the next log is another one
                self._note(error)
            except OSError as error:
                self._note(error)

    def _read_on(self) -> None:
        if self._fd < 0:
            return
        parts = [self._rest]
        while part := os.read(self._fd, 1 << 20):
            parts.append(part)
        data, at = b"".join(parts), 0
        while len(data) >= at + _LENGTH_BYTES:
            length = int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
            if length > _MAX_FRAME_BYTES:
                raise ProtocolError(f"a run of names of {length} bytes")
            if len(data) < at + _LENGTH_BYTES + length:
                break
            at += _LENGTH_BYTES
            self._take(data[at : at + length])
            at += length
        self._rest = data[at:]

    def _take(self, frame: bytes) -> None:
        try:
            run = msgspec.msgpack.decode(frame, type=_Run | _Rate)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"names cannot be read: {error}") from error
        if isinstance(run, _Rate):
            self._rate = run.rate
            return
        size = BLOCK_ID_BYTES if run.ids else 0
        for number in range(len(run.keys) // KEY_BYTES):
            key = run.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            self._found[key] = Named(run.ids[number * size : (number + 1) * size], run.naming)

    def _open(self, fd: int, inode: int) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._inode, self._rest = fd, inode, b""

    def _note(self, error: Exception) -> None:
        if str(error) != self._problem:
            self._problem = str(error)
            _log.warning("what the worker names blocks cannot be read, they are computed: %s", error)
