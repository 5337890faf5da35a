"""SGLang servers that prefill or decode alone (0.5.23): a request goes to both, and they find each other by its room.

The KV that would move is one token, fetched from the prefill server's bootstrap port over HTTP. The decode server goes
on only with that token in hand, and only if it is the one that it would have made itself.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from headwater.config.schema import EngineConfig
from sglang_double import GenerateBody, SglangDouble

_TIMEOUT_S = 10.0


class PairedDouble(SglangDouble):
    """Of one mode."""

    def __init__(self, config: EngineConfig, mode: str) -> None:
        super().__init__(config)
        self.mode = mode
        self.gate = asyncio.Event()
        """A prefill is done only once this is set."""
        self.gate.set()
        self.fetched: list[int] = []
        """Rooms whose KV has been moved."""
        self._bootstrap_port = 0
        self._rooms: dict[int, asyncio.Future[int]] = {}
        self._taken: dict[int, asyncio.Event] = {}

    async def start(self) -> None:
        if self.mode == "prefill":
            app = web.Application()
            app.add_routes([web.get("/rooms/{room}", self._room)])
            self._bootstrap = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            await self._bootstrap.setup()
            await web.TCPSite(self._bootstrap, "127.0.0.1", self._bootstrap_port).start()
            self._bootstrap_port = self._bootstrap.addresses[0][1]
        await super().start()

    async def stop(self) -> None:
        if self.mode == "prefill":
            await self._bootstrap.cleanup()
        await super().stop()

    def about(self) -> dict[str, Any]:
        return {"disaggregation_mode": self.mode, "disaggregation_bootstrap_port": self._bootstrap_port or 8998}

    async def generate(self, body: GenerateBody) -> AsyncIterator[dict[str, Any]]:
        if body.bootstrap_room is None or body.bootstrap_host is None or body.bootstrap_port is None:
            yield _aborted(body, 400, "Invalid request: Disaggregated request received without bootstrap room id.")
            return
        assert body.sampling_params.n == 1, "all choices would wait in the same room for ever"
        chunks = self._prefill(body) if self.mode == "prefill" else self._decode(body)
        async for chunk in chunks:
            yield chunk

    async def _prefill(self, body: GenerateBody) -> AsyncIterator[dict[str, Any]]:
        assert body.bootstrap_port == self._bootstrap_port
        params = msgspec.structs.replace(body.sampling_params, max_new_tokens=1, min_new_tokens=0)
        async for chunk in super().generate(msgspec.structs.replace(body, sampling_params=params)):
            await self.gate.wait()
            if body.rid in self.aborted:
                return
            room = self._at(body.bootstrap_room or 0)
            room.set_result(chunk["output_ids"][-1])
            await asyncio.wait_for(self._moved(body.bootstrap_room or 0).wait(), _TIMEOUT_S)
            yield chunk

    async def _decode(self, body: GenerateBody) -> AsyncIterator[dict[str, Any]]:
        try:
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
            where = f"http://{body.bootstrap_host}:{body.bootstrap_port}/rooms/{body.bootstrap_room}"
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(where) as answer:
                token = int(await answer.text())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            yield _aborted(body, 500, f"Decode transfer failed for {body.rid}: KVTransferError({error!r})")
            return
        first = True
        async for chunk in super().generate(body):
            assert not first or chunk["output_ids"][0] == token
            first = False
            yield chunk

    async def _room(self, request: web.Request) -> web.Response:
        room = int(request.match_info["room"])
        token = await asyncio.shield(self._at(room))
        self.fetched.append(room)
        self._moved(room).set()
        return web.Response(text=str(token))

    def _moved(self, room: int) -> asyncio.Event:
        return self._taken.setdefault(room, asyncio.Event())

    def _at(self, room: int) -> "asyncio.Future[int]":
        return self._rooms.setdefault(room, asyncio.get_running_loop().create_future())


def _aborted(body: GenerateBody, status: int, message: str) -> dict[str, Any]:
    reason = {"type": "abort", "message": message, "status_code": status, "err_type": None}
    meta = {"id": body.rid, "finish_reason": reason, "prompt_tokens": len(body.input_ids), "completion_tokens": 0}
    return {"text": "", "output_ids": [], "meta_info": meta}
