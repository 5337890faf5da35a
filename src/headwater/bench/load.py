"""Running a load: schedule, send, record. One task per request in flight, bounded connections, progress on the way."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal

import msgspec

from headwater.bench.arrivals import Arrivals
from headwater.bench.http_client import Connection, Target
from headwater.bench.sse import StreamReader
from headwater.bench.workload import LoadRequest
from headwater.errors import WorkerLost

Api = Literal["chat", "completions"]
_PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class RequestShape:
    """How a `LoadRequest` is put to the server."""

    model: str
    api: Api = "chat"
    ignore_eos: bool = True
    temperature: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict[str, Any])

    def body(self, request: LoadRequest) -> bytes:
        prompt: dict[str, Any] = (
            {"messages": [{"role": "user", "content": request.prompt}]}
            if self.api == "chat"
            else {"prompt": request.prompt}
        )
        body = {
            "model": self.model,
            **prompt,
            "max_tokens": request.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra_body,
        }
        return msgspec.json.encode(body)


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request. Times are seconds from when it should have been sent, so queueing counts."""

    started_s: float
    """From the start of the run."""
    ttft_s: float | None = None
    e2e_s: float | None = None
    gaps_s: list[float] = field(default_factory=list[float])
    """Between consecutive events that carry text."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    reads: int = 0
    error: str | None = None


class LoadRun:
    """One run against one target."""

    def __init__(self, target: Target, shape: RequestShape, *, timeout_s: float = 600.0) -> None:
        self._target = target
        self._shape = shape
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []

    async def run(
        self,
        requests: Iterable[LoadRequest],
        arrivals: Arrivals,
        on_record: Callable[[RequestRecord], None] = lambda record: None,
    ) -> list[RequestRecord]:
        """Send everything and wait for all answers. Failures are records too."""
        records: list[RequestRecord] = []
        slots = asyncio.Semaphore(arrivals.max_in_flight) if arrivals.max_in_flight else None
        start = perf_counter()

        async def one(due_s: float, request: LoadRequest) -> None:
            try:
                record = await self._send(start, due_s, request)
            finally:
                if slots is not None:
                    slots.release()
            records.append(record)
            on_record(record)

        async with asyncio.TaskGroup() as group:
            for at_s, request in arrivals.schedule(requests):
                await asyncio.sleep(max(0.0, start + at_s - perf_counter()))
                if slots is not None:
                    await slots.acquire()
                due_s = at_s if at_s > 0 else perf_counter() - start
                group.create_task(one(due_s, request))
        return records

    async def send_one(self, request: LoadRequest) -> RequestRecord:
        """A single request outside a run (warm-up, calibration)."""
        return await self._send(perf_counter(), 0.0, request)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _send(self, start: float, due_s: float, request: LoadRequest) -> RequestRecord:
        record = RequestRecord(started_s=due_s)
        reader = StreamReader()
        body = self._shape.body(request)
        head = self._target.head("POST", _PATHS[self._shape.api], len(body))
        try:
            async with self._connection() as connection:
                status = await connection.request(head, body, reader, self._timeout_s)
            finished = perf_counter()
            if status != 200:
                record.error = f"HTTP {status}: {reader.plain_body[:300].decode(errors='replace')}"
            else:
                _fill(record, reader, start + due_s, finished)
        except WorkerLost as error:
            record.error = error.message
        return record

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        while self._idle and self._idle[-1].closed:
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await Connection.open(self._target, min(30.0, self._timeout_s))
        yield connection
        if not connection.closed:
            self._idle.append(connection)


def _fill(record: RequestRecord, reader: StreamReader, due: float, finished: float) -> None:
    times = reader.token_times_s
    record.error = reader.error
    record.reads = reader.reads
    record.e2e_s = finished - due
    record.ttft_s = times[0] - due if times else None
    record.gaps_s = [later - earlier for earlier, later in pairwise(times)]
    record.prompt_tokens = reader.prompt_tokens or 0
    record.output_tokens = reader.completion_tokens if reader.completion_tokens is not None else len(times)
    if record.error is None and not times and record.output_tokens == 0:
        record.error = "the answer held no token"
