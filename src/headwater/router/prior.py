"""What to believe of a class of workers after its first step.

One step cannot tell what of its time was constant and what was work, and a model that takes it all for constant sees
no use in cached prefixes. So the first measurement scales the proportions of a usual engine (`UNKNOWN`), and that
counts as a little evidence: enough to decide what measurements leave open, soon outweighed where they do not.
"""

from headwater.perf.model import StepModel, StepShape
from headwater.protocol.events import StepTiming
from headwater.router.price import UNKNOWN

_WEIGHT = 0.1
"""Samples that all of it together is worth."""
_SHAPES = (
    *(StepShape(tokens, tokens * tokens / 2) for tokens in (16, 256, 1024, 4096, 8192)),
    *(StepShape(0, 0, sequences, 1000.0 * sequences) for sequences in (1, 8, 64)),
    StepShape(0, 0, 8, 200_000),
    StepShape(1024, 5e5, 8, 16_000),
)


def believe(model: StepModel, first: StepTiming) -> None:
    """Give a new model a prior, scaled by the first step measured."""
    measured = StepShape(
        first.num_prefill_tokens,
        first.num_prefill_context_tokens,
        first.num_decode_sequences,
        first.num_decode_context_tokens,
    )
    usual_ms = _usual_ms(measured)
    if usual_ms > 0 and first.duration_ms > 0:
        scale = first.duration_ms / usual_ms
        model.believe([(shape, scale * _usual_ms(shape)) for shape in _SHAPES], _WEIGHT)


def _usual_ms(shape: StepShape) -> float:
    total_ms = 0.0
    if shape.prefill_tokens:
        total_ms += UNKNOWN.prefill_step_ms
        total_ms += UNKNOWN.prefill_token_ms * shape.prefill_tokens + UNKNOWN.prefill_pair_ms * shape.prefill_pairs
    if shape.decode_sequences:
        total_ms += UNKNOWN.decode_ms(shape.decode_sequences, shape.decode_context_tokens)
    return total_ms
