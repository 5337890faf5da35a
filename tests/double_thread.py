"""A double of a server on an event loop of its own, so that a test can wait for other processes."""

import asyncio
import threading
from typing import Generic, TypeVar

from attached_stage import ServerDouble

Double = TypeVar("Double", bound=ServerDouble)


class DoubleThread(Generic[Double]):
    """Started."""

    def __init__(self, double: Double) -> None:
        self.double = double
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.call("start")

    def call(self, name: str) -> None:
        asyncio.run_coroutine_threadsafe(getattr(self.double, name)(), self._loop).result(10)

    def close(self) -> None:
        self.call("close")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
