"""Steps a real scheduler, executor and backend without an event loop, for tests of the native engine."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.clock import VirtualClock
from headwater.engines.core import EngineCore
from headwater.engines.native.base import Backend
from headwater.engines.native.runner import NativeExecutor
from headwater.engines.native.structured.base import ConstraintCompiler
from headwater.protocol.request import EngineRequest, ErrorInfo, SamplingParams, TokenLogprobs
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.scheduler import Scheduler


@dataclass(slots=True)
class Result:
    """All outputs of one sequence."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int | None = None
    error: ErrorInfo | None = None


class Core:
    """One engine in the hand of a test. A backend serves one `Core` after another."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos: tuple[int, ...] = (),
        compiler: ConstraintCompiler | None = None,
        **limits: Any,
    ) -> None:
        sizes: dict[str, Any] = {
            "num_blocks": backend.num_blocks,
            "block_size": backend.block_size,
            "max_model_len": backend.config.max_position_embeddings,
            "vocab_size": backend.config.vocab_size,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 64,
            "eos_token_ids": frozenset(eos),
            "namespace": b"test",
        }
        self.scheduler = Scheduler(SchedulerLimits(**sizes | limits))
        self.core = EngineCore(self.scheduler, NativeExecutor(backend, eos, compiler), VirtualClock())
        self.results: dict[int, Result] = {}

    def submit(self, *requests: EngineRequest) -> None:
        for output in self.core.submit(requests):
            self._note([output])

    def step(self) -> None:
        self._note(self.core.step().outputs)

    def run(
        self, requests: Sequence[EngineRequest], later: Mapping[int, Sequence[EngineRequest]] = {}
    ) -> dict[int, Result]:
        """Until all are done; `later` arrive before the step of that number."""
        self.submit(*requests)
        number = 0
        while self.core.has_work or number <= max(later, default=-1):
            self.submit(*later.get(number, ()))
            self.step()
            number += 1
        return self.results

    def _note(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            result = self.results.setdefault(output.stream, Result())
            assert result.finish_reason is None
            result.tokens += output.token_ids
            result.logprobs += output.logprobs or []
            result.finish_reason = output.finish_reason
            result.stop_token_id = output.stop_token_id
            result.error = output.error
            if output.num_cached_tokens is not None:
                result.num_cached_tokens = output.num_cached_tokens


def request(stream: int, prompt: Sequence[int], resumed: Sequence[int] = (), **sampling: Any) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    tokens, more = array("I", prompt).tobytes(), array("I", resumed).tobytes()
    return EngineRequest(stream, f"r{stream}", "m", tokens, params, resumed_tokens=more)
