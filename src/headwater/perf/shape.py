"""What is in one engine step."""

from typing import Self

import msgspec

from headwater.protocol.events import StepTiming


class StepShape(msgspec.Struct, frozen=True, gc=False):
    prefill_tokens: float = 0.0
    prefill_pairs: float = 0.0
    """Sum over new tokens of the tokens each attends to."""
    decode_sequences: float = 0.0
    decode_context_tokens: float = 0.0

    @classmethod
    def of(cls, timing: StepTiming) -> Self:
        """Of a step that was measured."""
        return cls(
            timing.num_prefill_tokens,
            timing.num_prefill_context_tokens,
            timing.num_decode_sequences,
            timing.num_decode_context_tokens,
        )

    def features(self) -> tuple[float, ...]:
        return (
            1.0,
            1.0 if self.prefill_tokens > 0 else 0.0,
            self.prefill_tokens,
            self.prefill_pairs,
            1.0 if self.decode_sequences > 0 else 0.0,
            self.decode_sequences,
            self.decode_context_tokens,
        )
