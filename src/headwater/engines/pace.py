"""Step times of an engine that tells none, judged by when its tokens come.

The tokens of one step reach us together. Only what is clear is counted: a burst of decodes that follows another one
while no prompt is being computed, and the first token of a prompt that was computed alone and in one step.
"""

from collections.abc import Mapping, Sequence

from headwater.config.schema import EngineConfig
from headwater.engines.external import ExternalEngine, OpenStream
from headwater.protocol.events import StepTiming
from headwater.protocol.request import SequenceOutput

_LONGEST_STEP_S = 2.0


class Pace:
    """Fed with what each turn of the event loop brought, before it is counted."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._last: float | None = None

    def observe(
        self, outputs: Sequence[SequenceOutput], streams: Mapping[int, OpenStream], now: float
    ) -> StepTiming | None:
        last, self._last = self._last, now
        burst = [stream for output in outputs if output.token_ids and (stream := streams.get(output.stream))]
        if not burst:
            self._last = last
            return None
        waiting = [stream for stream in streams.values() if not stream.num_generated]
        if not waiting:
            return self._decode(burst, now, last)
        return self._prefill(waiting[0], now) if len(streams) == 1 else None

    def forget(self) -> None:
        """Nothing runs: the next burst follows none."""
        self._last = None

    def _decode(self, burst: Sequence[OpenStream], now: float, last: float | None) -> StepTiming | None:
        if last is None or now - last > _LONGEST_STEP_S:
            return None
        context = sum(stream.num_prompt_tokens + stream.num_generated for stream in burst)
        return StepTiming(0, 0, len(burst), context, (now - last) * 1e3)

    def _prefill(self, stream: OpenStream, now: float) -> StepTiming | None:
        if stream.request.prefill is not None:
            return None  # computed elsewhere
        cached = stream.request.expected_cached_tokens
        new = stream.num_prompt_tokens - cached
        if not 0 < new <= self._chunk_tokens:
            return None
        pairs = new * cached + new * (new + 1) // 2
        return StepTiming(new, pairs, 0, 0, (now - stream.submitted) * 1e3)


class PacedEngine(ExternalEngine):
    """One that tells no step times."""

    quiet_prefill = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.pace = Pace(0)
        """To be told how much a step may compute."""

    def deliver_step(self, outputs: list[SequenceOutput]) -> None:
        """As `deliver`, and judged by when it comes."""
        timing = self.pace.observe(outputs, self.open, self.clock.now())
        if timing is not None:
            self.time_step(timing)
        self.deliver(outputs)
        if not self.open:
            self.pace.forget()
