"""Waiting for work on other threads that cannot be called off and uses the caller's buffers until it is done."""

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def finished(work: "asyncio.Future[T]") -> T:
    """The result; a cancellation is passed on once the work is done."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if not work.done():
            await asyncio.wait([work])
        raise
