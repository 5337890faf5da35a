"""All feeds of one engine: what they bring is told in our terms; what they lose is forgotten."""

import contextlib
import logging
from collections.abc import Callable, Iterable

from headwater.engines.kv_feed.subscription import Feed, FeedAddress
from headwater.engines.kv_feed.translate import FeedTranslator
from headwater.engines.kv_feed.wire import ForeignBatch
from headwater.protocol.events import WorkerEvent
from headwater.runtime.zeromq import ZmqContext

_log = logging.getLogger(__name__)


class Telling:
    """Where the batches of one engine go, in order. `name`: the engine's, for the log."""

    def __init__(self, name: str, translator: FeedTranslator, tell: Callable[[list[WorkerEvent]], None]) -> None:
        self._name = name
        self._translator = translator
        self._tell = tell

    def forget(self) -> None:
        """The engine has nothing of what it had."""
        self._tell(self._translator.clear())

    # FeedSink

    def on_batch(self, batch: ForeignBatch) -> None:
        self._tell(self._translator.apply(batch))

    def on_lost(self, reason: str) -> None:
        _log.warning("KV events of %s were lost (%s): what it has cached is learned anew", self._name, reason)
        self.forget()


class Following(Telling):
    """What an engine publishes, from construction to `close`."""

    def __init__(
        self,
        name: str,
        addresses: Iterable[FeedAddress],
        translator: FeedTranslator,
        tell: Callable[[list[WorkerEvent]], None],
    ) -> None:
        super().__init__(name, translator, tell)
        self._context = ZmqContext()
        self.feeds = [Feed(self._context, address, self) for address in addresses]

    async def close(self) -> None:
        for feed in self.feeds:
            feed.close()
        with contextlib.suppress(TimeoutError):
            await self._context.term()
