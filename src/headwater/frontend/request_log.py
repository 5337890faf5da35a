"""Writes the log of served requests (`headwater.protocol.request_log`) beside the work, never in its way.

`note` costs an append; hashing and encoding is left to `headwater.frontend.background_lines`, and the frontends of a
host may share a file (`headwater.frontend.line_file`). FILE.key holds the key of the hashes; delete it, and what is
logged from then on can no longer be matched with what was before.
"""

import fcntl
import os
import secrets
from base64 import b64encode
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import msgspec

from headwater.clock import Clock
from headwater.errors import ConfigError
from headwater.frontend.background_lines import BackgroundLines
from headwater.frontend.line_file import LineFile
from headwater.frontend.submission import Submission
from headwater.protocol.request_log import FORMAT, KEY_BYTES, VERSION, LoggedRequest, LogHeader, Outcome
from headwater.types import BLOCK_ID_BYTES

_SECRET_BYTES = 32
_NAME_BYTES = 8
_MAX_PENDING = 8192
_MAX_PENDING_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A sequence as the dispatcher knows it when it is over."""

    at: float
    """Epoch seconds of its arrival."""
    model: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    block_size: int
    block_ids: bytes
    outcome: Outcome
    session: str = ""
    tenant: str = ""
    priority: int = 0
    worker: str = ""
    cached_tokens: int = 0
    ttft_ms: float | None = None
    e2e_ms: float = 0.0


class RequestNotes(Protocol):
    """Who is told of every sequence that has ended. Called in the hot loop: must not wait, must not raise."""

    def note(self, ended: EndedRequest) -> None: ...


def ended_request(
    submission: Submission, outcome: Outcome, output_tokens: int = 0, e2e_ms: float = 0.0
) -> EndedRequest:
    """One sequence of a submission that is over."""
    asked, record = submission.request, submission.record
    return EndedRequest(
        at=record.asked,
        model=record.model,
        prompt_tokens=asked.num_prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=asked.max_tokens,
        block_size=asked.block_size,
        block_ids=asked.block_ids,
        outcome=outcome,
        session=asked.session_id or "",
        tenant=record.tenant,
        priority=record.priority,
        worker=record.worker_id or "",
        cached_tokens=record.cached_tokens or 0,
        ttft_ms=record.ttft_ms,
        e2e_ms=e2e_ms,
    )


class RequestLog:
    """See the module docstring. `note` and `close` are for one thread, the event loop's."""

    def __init__(self, path: Path, clock: Clock, *, max_bytes: int, kept_files: int) -> None:
        """Raises `ConfigError` when the file or its key cannot be written."""
        try:
            header = msgspec.json.encode(LogHeader(FORMAT, VERSION)) + b"\n"
            file = LineFile(path, _key_path(path), max_bytes=max_bytes, kept_files=kept_files, header=header)
            self._secret = _secret(path)
        except OSError as error:
            raise ConfigError(f"cannot record requests in {path}: {error.strerror}") from error
        self._lines: BackgroundLines[EndedRequest] = BackgroundLines(
            file,
            lambda ended: msgspec.json.encode(self._logged(ended)),
            clock,
            loss="requests could not be recorded",
            max_pending=_MAX_PENDING,
            max_pending_bytes=_MAX_PENDING_BYTES,
        )

    @property
    def num_dropped(self) -> int:
        return self._lines.num_dropped

    def note(self, ended: EndedRequest) -> None:
        """Never waits and never raises."""
        self._lines.add(ended, len(ended.block_ids))

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._lines.close()

    def _logged(self, ended: EndedRequest) -> LoggedRequest:
        ids = ended.block_ids
        keyed = blake2b(key=self._secret, digest_size=KEY_BYTES)
        blocks: list[bytes] = []
        for start in range(0, len(ids), BLOCK_ID_BYTES):
            block = keyed.copy()
            block.update(ids[start : start + BLOCK_ID_BYTES])
            blocks.append(block.digest())
        return LoggedRequest(
            at=round(ended.at, 6),
            model=ended.model,
            prompt_tokens=ended.prompt_tokens,
            output_tokens=ended.output_tokens,
            max_tokens=ended.max_tokens,
            block_size=ended.block_size,
            blocks=b64encode(b"".join(blocks)).decode(),
            outcome=ended.outcome,
            session=self._name(ended.session),
            tenant=self._name(ended.tenant),
            priority=ended.priority,
            worker=ended.worker,
            cached_tokens=ended.cached_tokens,
            ttft_ms=None if ended.ttft_ms is None else round(ended.ttft_ms, 3),
            e2e_ms=round(ended.e2e_ms, 3),
        )

    def _name(self, name: str) -> str:
        return blake2b(name.encode(), key=self._secret, digest_size=_NAME_BYTES).hexdigest() if name else ""


def _key_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.key")


def _secret(path: Path) -> bytes:
    """The key of the hashes; made by whoever comes first."""
    descriptor = os.open(_key_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        known = os.pread(descriptor, _SECRET_BYTES, 0)
        if len(known) == _SECRET_BYTES:
            return known
        secret = secrets.token_bytes(_SECRET_BYTES)
        os.pwrite(descriptor, secret, 0)
        return secret
    finally:
        os.close(descriptor)
