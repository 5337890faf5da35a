"""A proxy in front of a worker's request plane on a Unix socket, for links that break."""

import asyncio
import os
import time


class PlaneProxy:
    """Carries the request plane of a worker, until it is cut (closed) or frozen (open, but nothing passes)."""

    def __init__(self, target: str) -> None:
        self._target = target.split("#")[0].removeprefix("ipc://")
        self._key = target.partition("#")[2]
        self._path = f"{os.environ['XDG_RUNTIME_DIR']}/proxy-{time.monotonic_ns()}"
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.frozen = False

    @property
    def address(self) -> str:
        return f"ipc://{self._path}" + (f"#{self._key}" if self._key else "")

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(self._target)
        self._writers += [writer, there_writer]
        pairs = ((reader, there_writer), (there_reader, writer))
        self._tasks += [asyncio.create_task(self._pump(*pair)) for pair in pairs]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.frozen:
                writer.write(data)
                await writer.drain()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
