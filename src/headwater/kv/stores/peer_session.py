"""One other node, as the peer tier sees it: a connection made when it is needed, questions matched to answers."""

import asyncio
from typing import TypeVar

from headwater.errors import ProtocolError, TierUnavailable, TransferError
from headwater.kv.stores.breaker import Breaker
from headwater.kv.stores.peer_wire import Question, Reply, greet, receive, send
from headwater.transfer.agent import Agent

Answer = TypeVar("Answer", bound=Reply)

_MAX_OPEN = 256


class PeerSession:
    """See the module docstring. Every failure ends the connection and counts for the breaker."""

    def __init__(self, host: str, port: int, agent: Agent, key: bytes, breaker: Breaker, connect_s: float) -> None:
        self.name = f"{host}:{port}"
        self.breaker = breaker
        self._address = host, port
        self._agent = agent
        self._key = key
        self._connect_s = connect_s
        self._connecting: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._open: dict[int, asyncio.Future[Reply]] = {}
        self._serial = 0

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    async def ask(self, question: Question, kind: type[Answer], timeout_s: float) -> Answer:
        """Raises `TierUnavailable`."""
        if not self.breaker.allow():
            raise TierUnavailable(
                f"peer {self.name}: {self.breaker.reason}", retry_after_s=self.breaker.retry_after_s()
            )
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._ask(question)
            if not isinstance(answer, kind):
                raise ProtocolError(f"{type(answer).__name__} in answer to {type(question).__name__}")
        except (OSError, EOFError, ProtocolError, TransferError, TierUnavailable) as error:
            raise self.failed(error, timeout_s) from None
        except asyncio.CancelledError:
            self.breaker.abandon()
            raise
        self.breaker.succeed()
        return answer

    def failed(self, error: Exception, timeout_s: float = 0.0) -> TierUnavailable:
        """Something about this peer went wrong."""
        reason = str(error) or (
            f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else "it hung up"
        )
        self.breaker.fail(reason)
        if not isinstance(error, TimeoutError):
            self._hang_up()
        return TierUnavailable(f"peer {self.name}: {reason}", retry_after_s=self.breaker.retry_after_s())

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        self._hang_up()
        if self._listener is not None:
            await asyncio.gather(self._listener, return_exceptions=True)

    async def _ask(self, question: Question) -> Reply:
        if self._writer is None:
            await self._connected()
        writer = self._writer
        if writer is None or len(self._open) >= _MAX_OPEN:
            raise TierUnavailable("too many questions are open" if writer else "it hung up")
        answer = self._open[question.serial] = asyncio.get_running_loop().create_future()
        try:
            send(writer, question)
            reply: Reply = await answer
            return reply
        finally:
            self._open.pop(question.serial, None)

    async def _connected(self) -> None:
        """A caller that gives up leaves the attempt going: the next one finds it further on."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
        await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        async with asyncio.timeout(self._connect_s):
            reader, writer = await asyncio.open_connection(*self._address)
        try:
            async with asyncio.timeout(self._connect_s):
                self._agent.add_peer(await greet(reader, writer, self._key, self._agent.card()))
        except BaseException:
            writer.close()
            raise
        self._writer = writer
        self._listener = asyncio.create_task(self._listen(reader, writer))

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                message = await receive(reader)
                if not isinstance(message, Reply):
                    raise ProtocolError(f"{type(message).__name__} out of turn")
                answer = self._open.get(message.serial)
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except (OSError, EOFError, ProtocolError) as error:
            self._end(writer, error)
        finally:
            writer.close()

    def _hang_up(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
        if self._writer is not None:
            self._end(self._writer, ConnectionResetError("hung up"))

    def _end(self, writer: asyncio.StreamWriter, error: Exception) -> None:
        writer.close()
        if self._writer is writer:
            self._writer = None
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(error if isinstance(error, ProtocolError) else ConnectionResetError("it hung up"))
