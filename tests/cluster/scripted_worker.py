"""A worker without an engine: real planes and lease, answers by script."""

import asyncio
from collections.abc import Callable
from hashlib import sha256

import msgspec

from headwater.protocol import PROTOCOL_VERSION
from headwater.protocol.cluster import Artifact, Instance, InstanceState, ModelCard
from headwater.protocol.events import LoadReport, WorkerEvent
from headwater.protocol.frames import Abort, ArtifactChunk, FetchArtifact, FrontendFrame, StepFrame, Submit
from headwater.protocol.request import EngineRequest, ErrorInfo, SequenceOutput
from headwater.runtime.planes import Planes
from headwater.runtime.registry.base import Lease, Registry

ARTIFACTS = {"tokenizer.json": b"{}" * 1000, "chat_template.jinja": b"hello"}


def artifacts_of(contents: dict[str, bytes]) -> list[Artifact]:
    return [Artifact(name, sha256(data).hexdigest(), len(data)) for name, data in contents.items()]


def scripted_card(
    name: str = "m", fingerprint: str = "f1", contents: dict[str, bytes] | None = None, **fields: object
) -> ModelCard:
    card = ModelCard(
        name=name,
        served_names=[name],
        fingerprint=fingerprint,
        architecture="scripted",
        dtype="none",
        kv_layout="none",
        max_model_len=8192,
        block_size=16,
        vocab_size=49_152,
        artifacts=artifacts_of(ARTIFACTS if contents is None else contents),
    )
    return msgspec.structs.replace(card, **fields)


class ScriptedWorker:
    """By default keeps what it is sent; `on_submit` may answer at once."""

    def __init__(
        self, worker_id: str, planes: Planes, card: ModelCard | None = None, contents: dict[str, bytes] | None = None
    ) -> None:
        self.worker_id = worker_id
        self.card = card or scripted_card()
        self.requests: list[EngineRequest] = []
        self.aborted: list[int] = []
        self.fetches: list[FetchArtifact] = []
        self.on_submit: Callable[[EngineRequest], None] | None = None
        self.damage: Callable[[ArtifactChunk], ArtifactChunk] = lambda chunk: chunk
        self.load = LoadReport(
            num_running=0, num_waiting=0, waiting_prefill_tokens=0, kv_blocks_total=100, kv_blocks_free=100
        )
        self._contents = {sha256(d).hexdigest(): d for d in (ARTIFACTS if contents is None else contents).values()}
        self._peers: dict[int, bytes] = {}
        self._listener = planes.listener()
        self._publisher = planes.publisher()
        self._lease: Lease | None = None
        self._instance: Instance | None = None

    async def start(self, registry: Registry, state: InstanceState = "ready") -> None:
        request_address = await self._listener.listen(self.worker_id, self._on_frame, lambda peer: None)
        event_address = await self._publisher.open(self.worker_id, lambda: [self.load])
        self._instance = Instance(
            worker_id=self.worker_id,
            role="both",
            state=state,
            card=self.card,
            request_address=request_address,
            event_address=event_address,
            engine="scripted",
            version=PROTOCOL_VERSION,
        )
        self._lease = await registry.register(self._instance)

    async def set_state(self, state: InstanceState) -> None:
        assert self._instance is not None
        assert self._lease is not None
        self._instance = msgspec.structs.replace(self._instance, state=state, card=self.card)
        await self._lease.update(self._instance)

    async def give_up_lease(self) -> None:
        if self._lease is not None:
            await self._lease.release()
            self._lease = None

    async def vanish(self) -> None:
        """The connections go first, as with a killed process."""
        await self._listener.close()
        await self._publisher.close()

    async def close(self) -> None:
        await self.vanish()
        await self.give_up_lease()

    def publish(self, load: LoadReport) -> None:
        self.load = load
        self._publisher.publish([load])

    def tell(self, *events: WorkerEvent) -> None:
        self._publisher.publish(list(events))

    def step(self, *outputs: SequenceOutput) -> None:
        """One engine step: a frame per frontend."""
        by_peer: dict[bytes, list[SequenceOutput]] = {}
        for output in outputs:
            by_peer.setdefault(self._peers[output.stream], []).append(output)
        for peer, mine in by_peer.items():
            self._listener.send(peer, StepFrame(mine))

    def finish(self, stream: int, token_ids: list[int] | None = None) -> None:
        self.step(SequenceOutput(stream, token_ids or [1], "stop", num_cached_tokens=0))

    def refuse(self, stream: int, code: str, message: str) -> None:
        self.step(SequenceOutput(stream, [], "error", error=ErrorInfo(code, message, 503, True)))

    def _on_frame(self, peer: bytes, frame: FrontendFrame) -> None:
        match frame:
            case Submit(requests):
                for request in requests:
                    self.requests.append(request)
                    self._peers[request.stream] = peer
                    if self.on_submit is not None:
                        self.on_submit(request)
            case Abort(streams):
                self.aborted += streams
            case FetchArtifact(digest, offset, length):
                self.fetches.append(frame)
                data = self._contents.get(digest)
                if data is None:
                    error = ErrorInfo("not_found", "no such artifact", 404)
                    chunk = ArtifactChunk(digest, offset, 0, b"", error)
                else:
                    chunk = ArtifactChunk(digest, offset, len(data), data[offset : offset + length])
                self._listener.send(peer, self.damage(chunk))
            case _:
                pass


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait for something that happens on this loop."""
    for _ in range(int(within_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true in time")
