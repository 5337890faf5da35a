"""A small HTTP client for one connection, and answers for the scripted worker behind it."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from scripted_worker import ScriptedWorker

from headwater.protocol.request import EngineRequest, SequenceOutput

CHAT = {"model": "bench", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        await self.send(method, path, body, **headers)
        return await self.read()

    async def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        content = json.dumps(body).encode() if body is not None else b""
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(content)}"]
        lines += ["content-type: application/json"] if content else []
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        await self.writer.drain()

    async def read(self) -> Reply:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 20)).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        status = int(head[0].split()[1])
        if "content-length" in headers:
            return Reply(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        body = b""
        while size := int(await asyncio.wait_for(self.reader.readline(), 20), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return Reply(status, headers, body)


def answer_at_once(worker: ScriptedWorker, request: EngineRequest) -> None:
    total = request.sampling.max_tokens
    for number in range(total):
        last = number == total - 1
        cached = 16 if number == 0 else None
        worker.step(
            SequenceOutput(request.stream, [504 + number], "length" if last else None, num_cached_tokens=cached)
        )
