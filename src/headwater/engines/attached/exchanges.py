"""Single sequences at an attached server: one HTTP request each, whose answer goes into a sink as it comes.

What a coroutine here raises is how its sequence ends. An answer that is left before its end is aborted: servers take a
closed connection as a wish to stop, and those that do not are told.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import ClientResponse

from headwater.engines.attached.answer import Answer
from headwater.engines.attached.dialects.base import Aborts, HandsOver
from headwater.engines.attached.http import Server, Unreachable, refusal_for
from headwater.errors import HeadwaterError, WorkerLost
from headwater.protocol.request import EngineRequest, SequenceOutput

_log = logging.getLogger(__name__)

_TICKET_S = 60.0
"""Until the first token: longer than servers wait for KV themselves."""
_MAX_ERROR_BYTES = 64 * 1024
_MAX_ABORTING = 1024
"""Messages under way; beyond that a closed connection has to do."""

Asked = tuple[str, bytes]
"""Path and body."""


class Exchanges:
    """`take`: the sink; `is_lost`: whether the server is known not to answer."""

    def __init__(
        self, server: Server, dialect: object, take: Callable[[SequenceOutput], None], is_lost: Callable[[], bool]
    ) -> None:
        self._server = server
        self._aborts = dialect if isinstance(dialect, Aborts) else None
        self._take = take
        self._is_lost = is_lost
        self._aborting: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """What is to be aborted has been, or cannot be."""
        await asyncio.gather(*self._aborting, return_exceptions=True)

    async def stream(
        self, request: EngineRequest, asked: Asked, answer: Answer, limit: asyncio.Timeout | None = None
    ) -> None:
        """Tokens. `limit`: on the time until the first one."""
        headers = {"x-request-id": f"{request.request_id}-{request.stream}"}
        try:
            async with self._server.stream(*asked, headers) as response:
                if response.status != 200:
                    answer.complete = True
                    raise await _refusal(response)
                async for piece in response.content.iter_any():
                    for output in answer.feed(piece):
                        if limit is not None:
                            limit.reschedule(None)
                        self._take(output)
                    if answer.goes_on:
                        break
        finally:
            if not answer.complete:
                self._abort_there(request)
        if not answer.ended:
            raise WorkerLost("the attached server ended its answer without saying why")

    async def stream_with_ticket(
        self, request: EngineRequest, asked: Asked, answer: Answer, again: Callable[[], tuple[Asked, Answer]]
    ) -> None:
        """A ticket whose KV is gone, or does not come in time, costs a prefill here: `again` asks without it."""
        try:
            async with asyncio.timeout(_TICKET_S) as limit:
                await self.stream(request, asked, answer, limit)
            return
        except TimeoutError:
            reason = f"no token within {_TICKET_S:.0f} s"
        except HeadwaterError as error:
            if answer.begun or isinstance(error, Unreachable):
                raise
            reason = str(error)
        _log.warning(
            "the server prefills itself, its ticket is void: %s", reason, extra={"request_id": request.request_id}
        )
        await self.stream(request, *again())

    async def prefill(self, hands: HandsOver, request: EngineRequest, asked: tuple[str, Any], timeout_s: float) -> None:
        """For another server, which fetches the KV."""
        path, body = asked
        answer = await self._server.post_json(path, body, timeout_s=timeout_s)
        self._take(hands.prefilled(request, answer))

    async def relay(self, request: EngineRequest, asked: Asked) -> None:
        """The answer as it is."""
        async with self._server.stream(*asked, {"x-request-id": request.request_id}) as response:
            if response.status != 200:
                raise await _refusal(response)
            async for piece in response.content.iter_any():
                self._take(SequenceOutput(request.stream, [0] * max(1, piece.count(b"\n\n")), relayed=piece))
        self._take(SequenceOutput(request.stream, [], "stop"))

    def _abort_there(self, request: EngineRequest) -> None:
        if self._aborts is not None and not self._is_lost() and len(self._aborting) < _MAX_ABORTING:
            task = asyncio.get_running_loop().create_task(self._tell(*self._aborts.abort(request)))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _tell(self, path: str, body: bytes) -> None:
        with contextlib.suppress(HeadwaterError):  # it is gone, or has long ended the answer
            await self._server.post(path, body)


async def _refusal(response: ClientResponse) -> HeadwaterError:
    return refusal_for(response.status, await response.content.read(_MAX_ERROR_BYTES), response.headers)
