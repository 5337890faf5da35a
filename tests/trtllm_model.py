"""What stands for TensorRT-LLM's executor in its doubles: the mocker as a model, its KV events in TensorRT-LLM's words,
and the fabric over which context servers hand KV to generation servers."""

import asyncio
import base64
import json
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from block_texts import BlockTexts, salted
from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo
from headwater.engines.mocker.engine import MockerEngine
from headwater.errors import HeadwaterError
from headwater.kv.identity import split_block_ids
from headwater.protocol.events import BlocksRemoved, BlocksStored, LoadReport, WorkerEvent
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput

MODEL = "double"


@dataclass
class Fabric:
    """KV that context servers keep for generation servers, until their time is up."""

    hold_s: float = 60.0
    hangs: bool = False
    """A generation server waits for KV that is gone, instead of failing."""
    held: dict[int, tuple[list[int], int, float]] = field(default_factory=dict[int, tuple[list[int], int, float]])
    """Prompt, first token and end, by context request."""
    taken: int = 0
    _numbers: int = 0

    def keep(self, prompt: Sequence[int], first: int) -> tuple[int, str]:
        """Id and opaque state."""
        self._numbers += 1
        self.held[self._numbers] = (list(prompt), first, time.monotonic() + self.hold_s)
        state = json.dumps({"peer": "ucx://nowhere", "request": self._numbers, "first": first})
        return self._numbers, base64.b64encode(state.encode()).decode()

    def take(self, number: int, opaque: str, prompt: Sequence[int]) -> int | None:
        """The first token; None: there is nothing of that kind any more."""
        state = json.loads(base64.b64decode(opaque))
        kept = self.held.pop(number, None)
        if state["request"] != number or kept is None or kept[2] < time.monotonic() or kept[0] != list(prompt):
            return None
        self.taken += 1
        return kept[1]


@dataclass
class _Running:
    tokens: list[int]
    kept_apart_by: str | None
    """An adapter's number and a salt."""
    answers: "asyncio.Queue[SequenceOutput]" = field(default_factory=asyncio.Queue)


class MockedExecutor:
    """Also the listener of its engine."""

    def __init__(self, config: EngineConfig, *, events: int = 4096, second_manager: bool = False) -> None:
        """`second_manager`: of KV blocks, `KVCacheManagerV2`. Its hashes are texts, and it names no salts."""
        self.config = msgspec.structs.replace(config, engine="mocker", served_model_name=(MODEL,))
        self.open: dict[int, _Running] = {}
        self.lengths: list[int] = []
        self._events: deque[dict[str, Any]] = deque(maxlen=events or 1)
        self._sends_events = events > 0
        self._second_manager = second_manager
        self._event_ids = 0
        self._sequences: dict[int, _Running] = {}
        self._texts = BlockTexts(lambda: ((each.tokens, each.kept_apart_by) for each in self._sequences.values()))
        self._numbers = 0
        self._stats: deque[dict[str, Any]] = deque(maxlen=1000)
        self._steps = 0
        self._preemptions = 0

    async def start(self) -> EngineInfo:
        """Begin a life: nothing is cached, events count from 0."""
        self._engine = MockerEngine(self.config)
        self.info = await self._engine.start(self, lambda _: None)
        self._events.clear()
        self._event_ids = 0
        self._texts.clear()
        self._tell({"type": "created", "num_blocks_per_cache_level": [self.info.kv_blocks, 0]})
        return self.info

    async def close(self) -> None:
        for stream in list(self.open):
            self.abort(stream)
        await self._engine.close()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        salt: str | None = None,
        lora: int | None = None,
        first: int | None = None,
    ) -> int:
        """`first`: a token that a context server has drawn."""
        kept_apart_by = None if salt is None and lora is None else f"{'' if lora is None else lora}/{salt or ''}"
        self._numbers += 1
        stream = self._numbers
        self._sequences[stream] = self.open[stream] = _Running(
            list(prompt) + ([] if first is None else [first]), kept_apart_by
        )
        packed = array("I", prompt).tobytes()
        resumed = b"" if first is None else array("I", [first]).tobytes()
        self._engine.submit(
            [
                EngineRequest(
                    stream,
                    f"double-{stream}",
                    MODEL,
                    packed,
                    sampling,
                    namespace=salted(self.info.card, kept_apart_by),
                    resumed_tokens=resumed,
                )
            ]
        )
        return stream

    def abort(self, stream: int) -> None:
        if self.open.pop(stream, None) is not None:
            self._engine.abort([stream])

    def finished(self, stream: int) -> None:
        if self.open.pop(stream, None) is not None:
            self.lengths.append(len(self._sequences[stream].tokens))

    def load(self) -> LoadReport:
        return self._engine.load()

    def drain_events(self) -> list[dict[str, Any]]:
        taken = list(self._events)
        self._events.clear()
        return taken

    def drain_stats(self) -> list[dict[str, Any]]:
        taken = list(self._stats)
        self._stats.clear()
        return taken

    # ---- EngineListener

    def on_step(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            sequence = self._sequences[output.stream]
            sequence.tokens.extend(output.token_ids)
            if output.stream in self.open:
                sequence.answers.put_nowait(output)

    def on_events(self, events: list[WorkerEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self._stored(event)
                case BlocksRemoved(block_ids=joined):
                    hashes = [self._hash(block_id) for block_id in split_block_ids(joined)]
                    self._tell({"type": "removed", "block_hashes": hashes})
                case LoadReport():
                    self._iterated(event)
                case _:
                    pass

    def on_failed(self, error: HeadwaterError) -> None:
        raise AssertionError(error)

    def _iterated(self, load: LoadReport) -> None:
        paused, self._preemptions = load.preemptions - self._preemptions, load.preemptions
        for timing in load.timings:
            self._steps += 1
            self._stats.append(
                {
                    "iter": self._steps,
                    "iterLatencyMS": timing.duration_ms,
                    "numActiveRequests": load.num_running,
                    "numQueuedRequests": load.num_waiting,
                    "kvCacheStats": {
                        "maxNumBlocks": load.kv_blocks_total,
                        "freeNumBlocks": load.kv_blocks_free,
                        "usedNumBlocks": load.kv_blocks_total - load.kv_blocks_free,
                        "tokensPerBlock": self.config.block_size,
                    },
                    "inflightBatchingStats": {
                        "numContextRequests": int(timing.num_prefill_tokens > 0),
                        "numCtxTokens": timing.num_prefill_tokens,
                        "numGenRequests": timing.num_decode_sequences,
                        "numPausedRequests": paused,
                    },
                }
            )
            paused = 0

    def _stored(self, event: BlocksStored) -> None:
        blocks = []
        for block_id in split_block_ids(event.block_ids):
            _, tokens, kept_apart_by = self._texts.of(block_id, self.info.card)
            salt = (kept_apart_by or "").partition("/")[2] or None
            block = {
                "type": "stored_block",
                "block_hash": self._hash(block_id),
                "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
                "cache_level": 0,
                "priority": 35,
            }
            blocks.append(block | {"cache_salt": None if self._second_manager else salt})
        parent = None if event.parent is None else self._hash(event.parent)
        self._tell({"type": "stored", "parent_hash": parent, "blocks": blocks})

    def _tell(self, data: dict[str, Any]) -> None:
        if self._sends_events:
            own = {"hash_algo": "v2_sha256", "layer_group_id": 0} if self._second_manager else {}
            self._events.append({"event_id": self._event_ids, "data": data, "window_size": 512, **own})
            self._event_ids += 1

    def _hash(self, block_id: bytes) -> int | str:
        return block_id.hex() if self._second_manager else int.from_bytes(block_id[:8], "big")
