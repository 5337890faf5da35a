"""Requests for a model whose tokenizer this frontend is about to have: they wait a moment instead of being refused.

Frontends that share a port are not ready at the same instant. A client that one of them has told so may meet another
next, and is to notice nothing. The wait is bounded, and so is the memory of those who wait.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

from headwater.errors import HeadwaterError, NoWorkers
from headwater.frontend.http.base import Handler, HttpRequest, Responder
from headwater.frontend.http.replies import reply_for
from headwater.frontend.waiting import Waiting

LONGEST_WAIT_S = 10.0
_RETRY_AFTER_S = 2.0


class ModelLoading(NoWorkers):
    """There are workers. `settled` is set once it can be served here, or once that has failed."""

    def __init__(self, message: str, settled: asyncio.Event) -> None:
        super().__init__(message, retry_after_s=_RETRY_AFTER_S)
        self.settled = settled


def answering(handler: Handler, waiting: Waiting) -> Handler:
    """What the handler raises becomes the answer; after `ModelLoading` it is called once more, in time."""

    def handle(request: HttpRequest, responder: Responder) -> Awaitable[None] | None:
        try:
            pending = handler(request, responder)
        except ModelLoading as loading:
            return _answered(again(loading, request, responder), responder)
        except HeadwaterError as error:
            reply_for(error).send_to(responder)
            return None
        return None if pending is None else _answered(patient(pending, request, responder), responder)

    async def patient(pending: Awaitable[None], request: HttpRequest, responder: Responder) -> None:
        try:
            await pending
        except ModelLoading as loading:
            await again(loading, request, responder)

    async def again(loading: ModelLoading, request: HttpRequest, responder: Responder) -> None:
        with suppress(TimeoutError), waiting.held(len(request.body)):
            async with asyncio.timeout(LONGEST_WAIT_S):
                await loading.settled.wait()
        # Also when the time is over: another version of the model may be there by now.
        if not responder.disconnected and (pending := handler(request, responder)) is not None:
            await pending

    return handle


async def _answered(pending: Awaitable[None], responder: Responder) -> None:
    try:
        await pending
    except HeadwaterError as error:
        reply_for(error).send_to(responder)
