"""A light load generator: it reads no more of an answer than it must, so that the server's cost can be told.

    python bench/frontend_load.py '{"port": 8000, "words": 100, ...}'     the fields of `Load`; prints a `Result`

Closed loop: every connection sends its next request when the answer to the last one is complete. Runs in a process of
its own (`run_load`).
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

SIMPLE_WORDS = "time year people way day man thing woman life child world school state family student".split()  # noqa: SIM905
TAIL_BYTES = 1000
"""Room for the event with the usage, which an honest answer ends with."""


@dataclass
class Load:
    """One run of the load generator."""

    port: int
    words: int
    max_tokens: int
    connections: int
    seconds: float = 5.0
    requests: int = 0
    """Stop after so many; 0: after the time."""
    seed: int = 1
    keep_gaps: bool = False
    """Whether to note the time between reads of one answer."""


@dataclass
class Result:
    requests: int = 0
    errors: int = 0
    error_sample: str = ""
    reads: int = 0
    wall_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection, one request after the other. Looks at no more of an answer than it must."""

    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        self.head = b""
        self.tail = b""
        self.reads = 0
        self.began = 0.0
        self.last = 0.0
        """When content came last; 0 before the first token."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        request = self.runner.next_request()
        if request is None:
            self.transport.close()
            return
        self.head, self.tail, self.reads, self.last = b"", b"", 0, 0.0
        self.began = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        runner = self.runner
        if not self.head:
            self.head = data[:300]
        if self.last:
            if runner.load.keep_gaps:
                runner.result.gaps_ms.append((now - self.last) * 1e3)
            self.last = now
        elif b"data:" in data:
            runner.result.ttft_ms.append((now - self.began) * 1e3)
            self.last = now
        self.reads += 1
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        if not self.head.startswith(b"HTTP/1.1 200"):
            runner.failed(self.head)
            self.transport.close()
        elif self.tail.endswith(b"\r\n0\r\n\r\n"):
            runner.result.requests += 1
            runner.result.reads += self.reads
            if runner.last_words not in self.tail or b"[DONE]" not in self.tail:
                runner.failed(self.tail)
            self.next()

    def connection_lost(self, exc: Exception | None) -> None:
        self.runner.lost(self)


class Runner:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.last_words = b'"completion_tokens":%d' % load.max_tokens
        self.result = Result()
        self.random = random.Random(load.seed)
        self.sent = 0
        self.open = 0
        self.done = asyncio.Event()
        self.deadline = 0.0

    async def run(self) -> Result:
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        self.deadline = began + self.load.seconds
        self.open = self.load.connections
        for start in range(0, self.load.connections, 200):
            batch = min(200, self.load.connections - start)
            await asyncio.gather(
                *(loop.create_connection(lambda: Client(self), "127.0.0.1", self.load.port) for _ in range(batch))
            )
        await self.done.wait()
        self.result.wall_s = time.perf_counter() - began
        return self.result

    def next_request(self) -> bytes | None:
        load = self.load
        over = self.sent >= load.requests if load.requests else time.perf_counter() >= self.deadline
        if over:
            return None
        self.sent += 1
        return http_request(prompt_of(self.random, load.words), load.max_tokens)

    def failed(self, sample: bytes) -> None:
        self.result.errors += 1
        self.result.error_sample = self.result.error_sample or sample.decode(errors="replace")

    def lost(self, client: Client) -> None:
        self.open -= 1
        if self.open == 0:
            self.done.set()


def prompt_of(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(SIMPLE_WORDS, k=words))


def http_request(prompt: str, max_tokens: int) -> bytes:
    """`prompt` needs no escapes in JSON."""
    body = (
        '{"model":"bench","messages":[{"role":"user","content":"'
        + prompt
        + f'"}}],"max_tokens":{max_tokens},"stream":true,"temperature":0.7,'
        + '"stream_options":{"include_usage":true},"ignore_eos":true}'
    )
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


class Loading:
    """A load in a process of its own."""

    def __init__(self, load: Load) -> None:
        self._found = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `result`
        self.process = subprocess.Popen([sys.executable, __file__, json.dumps(asdict(load))], stdout=self._found)

    def result(self) -> Result:
        """Waits for its end."""
        if self.process.wait():
            raise SystemExit("the load generator failed")
        with self._found as found:
            found.seek(0)
            return Result(**json.load(found))


def run_load(load: Load) -> Result:
    return Loading(load).result()


async def play(load: Load) -> Result:
    return await Runner(load).run()


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(play(Load(**json.loads(sys.argv[1])))))))
