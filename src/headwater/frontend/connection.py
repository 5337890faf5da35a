"""The frontend's connection to one worker: connect, notice the loss, connect again while the lease stands.

    CONNECTING -> CONNECTED -> (broken) -> CONNECTING -> ...    until `close`

Links are used once; every attempt makes a new one. While connected, load reports and KV events are followed too.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from headwater.errors import ConfigError, HeadwaterError, ModelError, ProtocolError, WorkerLost
from headwater.frontend.artifacts import check_artifact
from headwater.protocol.cluster import Artifact, Instance
from headwater.protocol.frames import Abort, ArtifactChunk, FetchArtifact, FrontendFrame, StepFrame, WorkerFrame
from headwater.runtime.requests.base import WorkerLink

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_CHUNK_BYTES = 4 * 1024 * 1024
_CHUNK_TIMEOUT_S = 20.0

OpenLink = Callable[[str], WorkerLink]
"""From a request address to a link that is not yet connected."""


class ConnectionOwner(Protocol):
    """Hears about a connection, on the event loop."""

    def on_connected(self, connection: "WorkerConnection") -> None: ...

    def on_step(self, connection: "WorkerConnection", frame: StepFrame) -> None: ...

    def on_lost(self, connection: "WorkerConnection", error: HeadwaterError) -> None: ...


class WorkerConnection:
    """One worker, for as long as its lease stands or its streams run."""

    def __init__(self, instance: Instance, open_link: OpenLink, owner: ConnectionOwner) -> None:
        self.instance = instance
        self.retired = False
        """The lease is gone: do not connect again."""
        self.quarantined = False
        """It did not move on: it gets nothing until it has answered a canary."""
        self.num_quarantines = 0
        """Of late."""
        self.admitted = 0.0
        """When it last came into service; monotonic seconds."""
        self.has_computed = False
        """Whether it has ever sent a token."""
        self.refuses = False
        """It answered when it was last greeted, but not so that it could be used."""
        self.last_error: str | None = None
        self._open_link = open_link
        self._owner = owner
        self._link: WorkerLink | None = None
        self._broken = asyncio.Event()
        self._error: HeadwaterError | None = None
        self._chunks: dict[str, asyncio.Future[ArtifactChunk]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def worker_id(self) -> str:
        return self.instance.worker_id

    @property
    def connected(self) -> bool:
        return self._link is not None and not self._broken.is_set()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"connection to {self.worker_id}")

    def send(self, frame: FrontendFrame) -> None:
        """Raises `WorkerLost` when there is no connection."""
        if self._link is None or self._broken.is_set():
            raise WorkerLost(f"worker {self.worker_id} is not connected")
        self._link.send(frame)

    def abort(self, streams: list[int]) -> None:
        """These are not wanted any more; nothing to say where there is no connection."""
        if self.connected:
            self.send(Abort(streams))

    async def close(self) -> None:
        """Idempotent. The owner hears nothing more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._drop_link(WorkerLost(f"the connection to worker {self.worker_id} was closed"))

    async def fetch(self, artifact: Artifact) -> bytes:
        """A file of the worker's model, not yet verified. Raises `ModelError` or `WorkerError`."""
        check_artifact(artifact)
        parts: list[bytes] = []
        received = 0
        while received < artifact.size:
            chunk = await self._fetch_chunk(artifact, received)
            self._check_chunk(artifact, received, chunk)
            parts.append(chunk.data)
            received += len(chunk.data)
        return b"".join(parts)

    async def _run(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            if await self._connect():
                delay_s = _FIRST_DELAY_S
                self._owner.on_connected(self)
                await self._broken.wait()
                error = self._error or WorkerLost(f"the connection to worker {self.worker_id} broke")
                self.last_error = error.message
                logger.warning("worker %s lost: %s", self.worker_id, error.message)
                await self._drop_link(error)
            if self.retired:
                return
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    async def _connect(self) -> bool:
        link = self._open_link(self.instance.request_address)
        self._broken.clear()
        self._error = None
        try:
            worker_id = await link.connect(self._on_frame, self._on_broken, _CONNECT_TIMEOUT_S)
            if worker_id != self.worker_id:
                raise ProtocolError(f"worker {worker_id} answers where {self.worker_id} was expected")
        except HeadwaterError as error:
            will_not_mend_itself = isinstance(error, ProtocolError | ConfigError)
            logger.log(
                logging.WARNING if will_not_mend_itself and error.message != self.last_error else logging.DEBUG,
                "worker %s cannot be reached: %s",
                self.worker_id,
                f"{error.message} ({error.hint})" if error.hint else error.message,
            )
            self.last_error, self.refuses = error.message, will_not_mend_itself
            await link.close()
            return False
        except asyncio.CancelledError:
            await link.close()
            raise
        self._link = link
        self.last_error, self.refuses = None, False
        return True

    def _on_frame(self, frame: WorkerFrame) -> None:
        if isinstance(frame, StepFrame):
            self._owner.on_step(self, frame)
        elif isinstance(frame, ArtifactChunk):
            waiting = self._chunks.pop(frame.digest, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(frame)

    def _on_broken(self, error: HeadwaterError) -> None:
        """At once, not when the task gets its turn: nothing may be sent there any more."""
        self._error = error
        self._broken.set()
        self._owner.on_lost(self, error)

    async def _drop_link(self, error: HeadwaterError) -> None:
        link, self._link = self._link, None
        for waiting in self._chunks.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._chunks.clear()
        if link is not None:
            await link.close()

    async def _fetch_chunk(self, artifact: Artifact, offset: int) -> ArtifactChunk:
        if artifact.digest in self._chunks:
            raise ModelError(f"artifact {artifact.name} is being fetched already")
        waiting: asyncio.Future[ArtifactChunk] = asyncio.get_running_loop().create_future()
        self.send(FetchArtifact(artifact.digest, offset, min(_CHUNK_BYTES, artifact.size - offset)))
        self._chunks[artifact.digest] = waiting
        try:
            return await asyncio.wait_for(waiting, _CHUNK_TIMEOUT_S)
        except TimeoutError:
            raise WorkerLost(f"worker {self.worker_id} did not send artifact {artifact.name} in time") from None
        finally:
            self._chunks.pop(artifact.digest, None)

    def _check_chunk(self, artifact: Artifact, offset: int, chunk: ArtifactChunk) -> None:
        if chunk.error is not None:
            raise ModelError(f"worker {self.worker_id} does not give out {artifact.name}: {chunk.error.message}")
        fits = 0 < len(chunk.data) <= artifact.size - offset
        if chunk.offset != offset or chunk.total != artifact.size or not fits:
            raise ProtocolError(f"worker {self.worker_id} sent a wrong part of artifact {artifact.name}")
