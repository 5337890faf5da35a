"""SGLang's own server: token ids through `/generate`, load through `/v1/loads`, events through `/server_info`.

Written against 0.5.23. What the server was started with decides some of what is sent: `describe` remembers it. A server
with events off, or with pages too small to be told of one by one, is attached all the same.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from headwater.engines.attached.dialects.base import Description, ServerLoad
from headwater.engines.attached.http import Server
from headwater.engines.sglang_wire.answers import Chunk, SglangReader
from headwater.engines.sglang_wire.arguments import generate_arguments
from headwater.engines.sglang_wire.events import feeds_of
from headwater.engines.sglang_wire.settings import LEAST_PAGE_SIZE, SglangSettings
from headwater.errors import EngineFailed, WorkerLost
from headwater.protocol.request import EngineRequest, SequenceOutput


class SglangDialect:
    """See `TokenDialect` and `Aborts`."""

    name = "sglang"

    def __init__(self) -> None:
        self._settings = SglangSettings()
        self._nonce = secrets.token_hex(8)
        self._retractions = 0

    async def describe(self, server: Server) -> Description:
        models = await server.get_json("/v1/models")
        entries = [entry for entry in models.get("data", ()) if entry.get("owned_by") == "sglang"]
        if not entries:
            raise EngineFailed("this server is not SGLang")
        await self.is_healthy(server)
        base = [entry for entry in entries if entry.get("parent") is None] or entries
        settings = self._settings = await _settings(server, base[0].get("max_model_len"))
        block_size = settings.block_size
        return Description(
            model=str(base[0]["id"]),
            aliases=[str(entry["id"]) for entry in base[1:]],
            adapters=[str(entry["id"]) for entry in entries if entry.get("parent") is not None],
            version=settings.version,
            max_model_len=settings.max_model_len,
            block_size=block_size,
            kv_blocks=settings.max_total_num_tokens // block_size * settings.dp_size if block_size else 0,
            max_num_seqs=settings.max_running_requests,
            max_num_batched_tokens=settings.chunked_prefill_size,
            feeds=feeds_of(settings, urlsplit(server.address.url).hostname or "127.0.0.1"),
            role=settings.role,
            bootstrap_port=settings.bootstrap_port,
            events_hint=_events_hint(settings),
            files=settings.tokenizer_path or settings.model_path,
        )

    async def is_healthy(self, server: Server) -> None:
        await server.get("/health")

    async def load(self, server: Server) -> ServerLoad | None:
        found = await server.find("/v1/loads?include=core")
        ranks = found.get("loads") if isinstance(found, dict) else None
        if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
            return None
        used, total = _sum(ranks, "num_used_tokens"), _sum(ranks, "max_total_num_tokens")
        running, waiting = _sum(ranks, "num_running_reqs"), _sum(ranks, "num_waiting_reqs")
        return ServerLoad(running, waiting, min(1.0, used / total) if total else 0.0, self._retractions)

    async def tokenize(self, server: Server, model: str, text: str) -> list[int]:
        answer = await server.post_json("/tokenize", {"model": model, "prompt": text})
        return cast("list[int]", answer["tokens"])

    def request(self, model: str, request: EngineRequest, tokens: Sequence[int], salt: str | None) -> tuple[str, bytes]:
        body = generate_arguments(request, tokens, salt, self._settings)
        body["rid"] = self._rid(request)
        return "/generate", msgspec.json.encode(body)

    def reader(self, request: EngineRequest) -> "StreamReader":
        answer = SglangReader(request, incremental=self._settings.incremental_streaming_output)
        return StreamReader(answer, self._on_retractions)

    def abort(self, request: EngineRequest) -> tuple[str, bytes]:
        """That a connection is closed SGLang takes note of after seconds."""
        return "/abort_request", msgspec.json.encode({"rid": self._rid(request)})

    def _on_retractions(self, count: int) -> None:
        """Of our own sequences: SGLang does not say how often it has happened to all."""
        self._retractions += count

    def _rid(self, request: EngineRequest) -> str:
        """SGLang aborts all whose names *begin* with the one that is given: none of ours begins with another one."""
        return f"hw-{self._nonce}-{request.stream}."


class StreamReader:
    """See `AnswerReader`."""

    _decode = msgspec.json.Decoder(Chunk).decode

    def __init__(self, answer: SglangReader, on_retractions: Callable[[int], None]) -> None:
        self._answer = answer
        self._on_retractions = on_retractions

    def read(self, event: bytes) -> SequenceOutput | None:
        try:
            chunk = self._decode(event)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WorkerLost(f"the attached server sent what is no answer: {error}") from error
        known = self._answer.num_retractions
        output = self._answer.read(chunk)
        if self._answer.num_retractions > known:
            self._on_retractions(self._answer.num_retractions - known)
        return output


async def _settings(server: Server, max_model_len: Any) -> SglangSettings:
    found = await server.find("/server_info") or await server.find("/get_server_info")
    try:
        return SglangSettings.read(found, max_model_len)
    except (msgspec.ValidationError, TypeError) as error:
        raise EngineFailed(
            f"what this SGLang server says of itself (/server_info) is not understood: {error}"
        ) from error


def _events_hint(settings: SglangSettings) -> str:
    if settings.page_size is not None and settings.page_size < LEAST_PAGE_SIZE:
        return (
            f"its pages of {settings.page_size} are too small to be followed: start SGLang with --page-size 16 or more"
        )
    return "start SGLang with --kv-events-config to change that"


def _sum(ranks: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(int(rank.get(name) or 0) for rank in ranks)
