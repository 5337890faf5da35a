"""What differs between kinds of servers: how they are asked what they serve, how busy they are, and for tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from headwater.engines.attached.http import Server
from headwater.engines.kv_feed.subscription import FeedAddress
from headwater.engines.texts import ModelTexts
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.types import Role


@dataclass(frozen=True, slots=True)
class Description:
    """What a server turned out to be."""

    model: str
    """What it calls its model."""
    aliases: Sequence[str] = ()
    adapters: Sequence[str] = ()
    """LoRA adapters, by the names that requests give."""
    version: str = ""
    max_model_len: int | None = None
    block_size: int | None = None
    kv_blocks: int = 0
    """0: unknown."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    feeds: Sequence[FeedAddress] = ()
    drained: str | None = None
    """The path from which KV events are taken out, where they are not published."""
    adapter_numbers: Mapping[int, str] = field(default_factory=dict[int, str])
    """Names of adapters by the numbers that such events give them."""
    role: Role | None = None
    """The only one it can have, for servers that work in pairs (`headwater.protocol.request.Pairing`)."""
    bootstrap_port: int | None = None
    """Of such a server that prefills: where the other one finds it."""
    events_hint: str = ""
    """Without feeds: how the server is made to have some."""
    created: int = 0
    """Epoch seconds, as the server says of its model; 0: it does not."""
    files: str | None = None
    """Folder or hub id of the model, as the server was told."""

    @property
    def identity(self) -> tuple[object, ...]:
        """What must not change while we are attached."""
        return (self.model, self.max_model_len, self.block_size, self.role)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server says of itself; it may serve others beside us."""

    num_running: int
    num_waiting: int
    kv_usage: float
    preemptions: int = 0


class AnswerReader(Protocol):
    """Reads the events of one streamed answer, but for the `[DONE]` that closes it."""

    def read(self, event: bytes) -> SequenceOutput | None:
        """None when the event says nothing. Raises `HeadwaterError` when it tells of a failure."""
        ...


class Dialect(Protocol):
    """One kind of server, for one server: it may remember what `describe` last found."""

    name: str

    async def describe(self, server: Server) -> Description:
        """Raises `EngineFailed` when it is not of this kind."""
        ...

    async def is_healthy(self, server: Server) -> None:
        """Raises what is wrong."""
        ...

    async def load(self, server: Server) -> ServerLoad | None:
        """None when it does not say."""
        ...


@runtime_checkable
class TokenDialect(Dialect, Protocol):
    """A server that takes and gives token ids."""

    async def tokenize(self, server: Server, model: str, text: str) -> list[int] | int:
        """As the server does, special tokens added as in a completion; only how many, where it says no more."""
        ...

    def request(self, model: str, request: EngineRequest, tokens: Sequence[int], salt: str | None) -> tuple[str, bytes]:
        """Path and body. Raises `InvalidRequest` for what it cannot do."""
        ...

    def reader(self, request: EngineRequest) -> AnswerReader: ...


@runtime_checkable
class Learns(Protocol):
    """A server of whose answers some can be read only by who knows the model's tokens."""

    async def learn(self, texts: ModelTexts) -> None: ...


@runtime_checkable
class Aborts(Protocol):
    """A server that wants to be told when an answer is not wanted any more, beside that its connection is closed."""

    def abort(self, request: EngineRequest) -> tuple[str, bytes]:
        """Path and body."""
        ...


@runtime_checkable
class Sleeps(Protocol):
    """A server that can give its device's memory back for a while."""

    async def sleep(self, server: Server) -> None: ...

    async def wake(self, server: Server) -> None: ...


@runtime_checkable
class HandsOver(Protocol):
    """A server that computes prompts for others of its kind, which fetch the KV from it by themselves."""

    def prefill(self, model: str, request: EngineRequest, tokens: Sequence[int], salt: str | None) -> tuple[str, Any]:
        """Path and body, to be answered in one piece. Raises `InvalidRequest` for what it cannot do."""
        ...

    def prefilled(self, request: EngineRequest, answer: Any) -> SequenceOutput:
        """The first token, and the ticket by which another server finds the KV: none where it gives none."""
        ...
