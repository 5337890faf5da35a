"""Reads logs of served requests (`headwater.protocol.request_log`) back as simulated requests.

Blocks may be merged into larger ones, since each id names the whole prefix up to its end. What a sequence generated is
known from whoever asked for it later: the prompt of a next turn begins with the earlier prompt and its answer.
Sequences without an answer (refused, or aborted before their first token) are left out.
"""

import gzip
from base64 import b64decode
from binascii import Error as BinasciiError
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from struct import pack
from typing import BinaryIO, cast

import msgspec

from headwater.errors import ConfigError
from headwater.protocol.request_log import FORMAT, KEY_BYTES, VERSION, LoggedRequest, LogHeader
from headwater.sim.workload import SimRequest
from headwater.types import BLOCK_ID_BYTES

_HEADER_BYTES = 256
_PADDING = bytes(BLOCK_ID_BYTES - KEY_BYTES)


def is_request_log(path: Path) -> bool:
    """Whether the file begins as a log of any version does. Raises `ConfigError` when it cannot be read."""
    with _opened(path) as file:
        try:
            return msgspec.json.decode(file.readline(_HEADER_BYTES), type=LogHeader).format == FORMAT
        except (msgspec.MsgspecError, OSError, EOFError):
            return False


def read_log(path: Path) -> Iterator[LoggedRequest]:
    """As written. Raises `ConfigError` that names the line that cannot be read."""
    decoder = msgspec.json.Decoder(LoggedRequest)
    with _opened(path) as file:
        _check_header(path, file.readline())
        for number, line in enumerate(file, 2):
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}:{number}: not a logged request: {error}") from error


def from_log(logged: Iterable[LoggedRequest], block_size: int) -> list[SimRequest]:
    """In order of arrival, from second 0 on. Raises `ConfigError` when blocks cannot be made of that size."""
    answered = sorted([one for one in logged if one.output_tokens > 0], key=lambda one: one.at)
    start_s = answered[0].at if answered else 0.0
    return _with_answers(
        [
            SimRequest(
                one.at - start_s, one.prompt_tokens, one.output_tokens, _block_ids(one, block_size), one.session or None
            )
            for one in answered
        ],
        block_size,
    )


def _with_answers(requests: list[SimRequest], block_size: int) -> list[SimRequest]:
    """Give each request the ids that a later prompt has where its answer ends."""
    turns = _Turns()
    found = list(requests)
    for number, request in enumerate(requests):
        earlier = turns.before(request)
        if earlier is not None:
            one = requests[earlier]
            computed = (one.prompt_tokens + one.output_tokens - 1) // block_size * BLOCK_ID_BYTES
            found[earlier] = replace(found[earlier], answer_ids=request.block_ids[len(one.block_ids) : computed])
        turns.add(number, request)
    return found


class _Turns:
    """Finds the earlier turn that a prompt goes on from: by session, or by a last block that one request alone had."""

    def __init__(self) -> None:
        self._by_session: dict[str, tuple[int, SimRequest]] = {}
        self._by_last_block: dict[bytes, tuple[int, SimRequest]] = {}
        self._seen: set[bytes] = set()

    def before(self, request: SimRequest) -> int | None:
        if request.session_id is not None:
            return _if_continued(self._by_session.get(request.session_id), request)
        ids = request.block_ids
        for end in range(len(ids), 0, -BLOCK_ID_BYTES):
            number = _if_continued(self._by_last_block.get(ids[end - BLOCK_ID_BYTES : end]), request)
            if number is not None:
                return number
        return None

    def add(self, number: int, request: SimRequest) -> None:
        if request.session_id is not None:
            self._by_session[request.session_id] = number, request
            return
        ids = request.block_ids
        blocks = [ids[start : start + BLOCK_ID_BYTES] for start in range(0, len(ids), BLOCK_ID_BYTES)]
        for block in blocks:
            self._by_last_block.pop(block, None)
        if blocks and blocks[-1] not in self._seen:
            self._by_last_block[blocks[-1]] = number, request
        self._seen.update(blocks)


def _if_continued(earlier: tuple[int, SimRequest] | None, later: SimRequest) -> int | None:
    if earlier is None:
        return None
    number, one = earlier
    longer = later.prompt_tokens >= one.prompt_tokens + one.output_tokens
    return number if longer and later.block_ids.startswith(one.block_ids) else None


def _block_ids(logged: LoggedRequest, block_size: int) -> bytes:
    merged, rest = divmod(block_size, logged.block_size)
    if rest:
        raise ConfigError(
            f"the log has blocks of {logged.block_size} tokens, which do not make blocks of {block_size}",
            hint=f"--block-size {logged.block_size}, or a multiple of it",
        )
    try:
        keys = b64decode(logged.blocks, validate=True)
    except BinasciiError as error:
        raise ConfigError(f"a logged request has blocks that are not base64: {error}") from error
    num_blocks = min(len(keys) // KEY_BYTES // merged, logged.prompt_tokens // block_size)
    if num_blocks < logged.prompt_tokens // block_size:
        # Without block ids (an engine that hashes itself) nothing is known to be shared.
        return b"".join([pack("<dII", logged.at, number, 1) for number in range(logged.prompt_tokens // block_size)])
    ends = range(merged - 1, num_blocks * merged, merged)
    return b"".join([keys[end * KEY_BYTES : (end + 1) * KEY_BYTES] + _PADDING for end in ends])


def _check_header(path: Path, line: bytes) -> None:
    try:
        header = msgspec.json.decode(line, type=LogHeader)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a log of requests: {error}") from error
    if header.format != FORMAT or header.version != VERSION:
        raise ConfigError(f"{path} is {header.format} version {header.version}, not {FORMAT} version {VERSION}")


def _opened(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
