"""What the scheduler hands to an executor, and what comes back: plain data.

Token ranges of one sequence:

    0 ........ num_cached ........ num_computed ........ num_tokens
    |  prefix hit  |  computed here  |  this step's slice  |
"""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headwater.protocol.request import EngineRequest, TokenLogprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside one engine. Owned by the scheduler; executors read it and keep their own state beside it."""

    stream: int
    request: EngineRequest
    token_ids: "array[int]"
    """typecode 'I': prompt, resumed and generated tokens."""
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    """Tokens whose KV is in the blocks."""
    num_cached_tokens: int = 0
    """Tokens of the prompt found in the prefix cache at first admission."""
    block_table: list[int] = field(default_factory=list[int])
    """Block numbers, in order; room for every token of the plan. Between two plans it grows at the end, starts anew
    after a preemption, and an entry that the last slice filled may be replaced by an older block with equal content.
    An executor that keeps rows of it reads again from the start of the sequence's last slice on."""
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated so far, here or before it was moved here."""
        return len(self.token_ids) - self.num_prompt_tokens


class Slice(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [start, start + num_tokens) of one sequence in this step."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether the last token of the slice is the last of the sequence, so that the next one is drawn."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Decoding slices (one token, sampling) come first, then prefill slices."""

    slices: tuple[Slice, ...]
    num_decode: int
    """How many of the slices, at the front, are single-token decodes."""
    num_prefill_tokens: int = 0
    prefill_context_tokens: int = 0
    """Sum over the prefill slices of (tokens x mean context they attend to)."""
    decode_context_tokens: int = 0
    """Sum of the context lengths of the decoding sequences."""


@dataclass(slots=True)
class StepResult:
    """What the executor did. Lists run over the sampling slices of the plan, in order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None
    duration_ms: float
    failures: dict[int, str] = field(default_factory=dict[int, str])
    """Sequences (by `stream`) that cannot go on, and why; their token is meaningless."""


class Executor(Protocol):
    """Runs plans. Called from one thread only."""

    def admit(self, sequence: Sequence) -> None:
        """Check what only the executor can (grammar, adapter) and set up state. Raises `RequestError`."""
        ...

    def execute(self, plan: StepPlan) -> StepResult: ...

    def release(self, sequence: Sequence) -> None:
        """The sequence is gone: forget its state. Also called for sequences never executed."""
        ...

    def close(self) -> None: ...
