"""Doubles of servers, and engines attached to them, in one process: what the tests of all kinds of servers share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import uvloop

from headwater.config.schema import EngineConfig
from headwater.engines.attached.engine import AttachedEngine
from headwater.engines.base import EngineInfo, EngineListener, ProgressSink
from headwater.engines.suite import SIZES
from headwater.engines.watched import Bench
from word_tokenizer import write_word_tokenizer


class ServerDouble(Protocol):
    @property
    def url(self) -> str: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


Double = TypeVar("Double", bound=ServerDouble)


class AttachedStage(Generic[Double]):
    """A double, and engines attached to it."""

    def __init__(self, folder: Path, double_of: Callable[[EngineConfig], Double]) -> None:
        """`double_of` makes one of the config of the mocker behind it."""
        self.tokenizer = write_word_tokenizer(folder)
        self.config = msgspec.structs.replace(SIZES, tokenizer=str(self.tokenizer), mocker_decode_base_ms=3.0)
        self.double = double_of(self.config)

    @asynccontextmanager
    async def attached(self, **changes: Any) -> AsyncIterator[Bench]:
        config = msgspec.structs.replace(SIZES, attach=(self.double.url,), tokenizer=str(self.tokenizer))
        async with Bench.running(AttachedEngine(msgspec.structs.replace(config, **changes))) as bench:
            yield bench

    def play(self, scenario: Coroutine[Any, Any, None]) -> None:
        """With the double started."""

        async def whole() -> None:
            await self.double.start()
            try:
                await scenario
            finally:
                await self.double.close()

        uvloop.run(asyncio.wait_for(whole(), 30))


class WithItsServer(AttachedEngine):
    """Starts the server just before it attaches to it, and stops it afterwards."""

    def __init__(self, config: EngineConfig, double: ServerDouble, kind: str) -> None:
        """`kind`: what the server must be recognised as."""
        super().__init__(msgspec.structs.replace(config, attach=("http://127.0.0.1:1",)))
        self._own_config = config
        self._double = double
        self._kind = kind

    async def start(self, listener: EngineListener, progress: ProgressSink) -> EngineInfo:
        await self._double.start()
        attached = msgspec.structs.replace(self._own_config, attach=(self._double.url,))
        AttachedEngine.__init__(self, attached)
        info = await super().start(listener, progress)
        assert info.engine == f"attached-{self._kind}"
        return info

    async def close_engine(self) -> None:
        await super().close_engine()
        await self._double.close()
