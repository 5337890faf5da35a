"""Makes up tokens and step times. The token at an output position depends on (prompt, seed, position) alone.

So output is the same whatever the batch, the chunks, preemption or the worker; unless the KV blocks of a sequence do
not hold what they should (`headwater.engines.mocker.marks`): then it is another one. An end token is never drawn: a
sequence runs to `max_tokens`, unless a word happens to be among its stop tokens. Sampling parameters other than the
seed and `logprobs` change nothing. Structured output is refused, since it could not be valid.
"""

import math
from array import array
from dataclasses import dataclass
from hashlib import blake2b

from headwater.config.schema import EngineConfig
from headwater.engines.mocker.marks import KvMarks
from headwater.errors import InvalidRequest
from headwater.protocol.request import EngineRequest, TokenLogprobs
from headwater.scheduler.plan import Sequence, StepPlan, StepResult

_DIGEST_BYTES = 64
_LN_HALF = math.log(0.5)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The modelled cost of a step, in ms."""

    prefill_per_token: float
    decode_base: float
    decode_per_sequence: float
    decode_per_kv_token: float

    @classmethod
    def of(cls, config: EngineConfig) -> "StepTimes":
        return cls(
            config.mocker_prefill_ms_per_token,
            config.mocker_decode_base_ms,
            config.mocker_decode_ms_per_sequence,
            config.mocker_decode_ms_per_kv_token,
        )

    def duration_ms(self, plan: StepPlan) -> float:
        prefill = self.prefill_per_token * plan.num_prefill_tokens
        if not plan.num_decode:
            return prefill
        kv = self.decode_per_kv_token * plan.decode_context_tokens
        return prefill + self.decode_base + self.decode_per_sequence * plan.num_decode + kv


class _Script:
    """The tokens of one sequence, drawn from a keyed hash in runs as they are needed."""

    __slots__ = ("_key", "_runs", "_words", "token_ids")

    def __init__(self, request: EngineRequest, words: tuple[int, ...]) -> None:
        seed = (request.sampling.seed & (2**64 - 1)).to_bytes(8, "little")
        self._key = blake2b(request.prompt, key=seed).digest()
        self._words = words
        self._runs = 0
        self.token_ids: list[int] = []

    def extend(self, length: int) -> None:
        words, count = self._words, len(self._words)
        while len(self.token_ids) < length:
            digest = blake2b(self._runs.to_bytes(8, "little"), key=self._key, digest_size=_DIGEST_BYTES).digest()
            self.token_ids += [words[number % count] for number in array("H", digest)]
            self._runs += 1


class MockerExecutor:
    """`headwater.scheduler.plan.Executor` without a model."""

    def __init__(self, times: StepTimes, words: tuple[int, ...], marks: KvMarks, block_size: int) -> None:
        self._times = times
        self._words = words
        self._marks = marks
        self._block_size = block_size
        self._unchecked: set[int] = set()
        """Sequences that have not drawn a token here yet."""
        self._scripts: dict[int, _Script] = {}
        self._num_logprobs: dict[int, int] = {}

    def admit(self, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        if sampling.structured is not None:
            raise InvalidRequest(
                "the mocker makes up its tokens: structured output needs another engine",
                param=sampling.structured.param,
            )
        self._scripts[sequence.stream] = _Script(sequence.request, self._words)
        self._unchecked.add(sequence.stream)
        if sampling.logprobs is not None:
            self._num_logprobs[sequence.stream] = sampling.logprobs

    def execute(self, plan: StepPlan) -> StepResult:
        sampling = [piece.sequence for piece in plan.slices if piece.samples]
        if self._unchecked:
            self._check_kv(plan)
        self._write_kv(plan)
        token_ids = [self._draw(sequence) for sequence in sampling]
        logprobs = self._logprobs(sampling, token_ids) if self._num_logprobs else None
        return StepResult(token_ids, logprobs, self._times.duration_ms(plan))

    def release(self, sequence: Sequence) -> None:
        self._scripts.pop(sequence.stream, None)
        self._num_logprobs.pop(sequence.stream, None)
        self._unchecked.discard(sequence.stream)

    def close(self) -> None:
        self._marks.close()
        self._scripts.clear()
        self._num_logprobs.clear()

    def _check_kv(self, plan: StepPlan) -> None:
        """Those that draw their first token here say what their blocks make of the prompt."""
        for piece in plan.slices:
            sequence = piece.sequence
            if piece.samples and sequence.stream in self._unchecked:
                self._unchecked.discard(sequence.stream)
                if not self._marks.agree(sequence, piece.start):
                    self._scripts[sequence.stream] = _Script(sequence.request, self._words[::-1])

    def _write_kv(self, plan: StepPlan) -> None:
        size, write = self._block_size, self._marks.write
        for piece in plan.slices[: plan.num_decode]:
            if not (piece.start + 1) % size:
                write(piece.sequence, piece.start, piece.start + 1)
        for piece in plan.slices[plan.num_decode :]:
            write(piece.sequence, piece.start, piece.start + piece.num_tokens)

    def _draw(self, sequence: Sequence) -> int:
        script = self._scripts[sequence.stream]
        position = len(sequence.token_ids) - sequence.num_prompt_tokens
        if position >= len(script.token_ids):
            script.extend(position + 1)
        return script.token_ids[position]

    def _logprobs(self, sampling: list[Sequence], token_ids: list[int]) -> list[TokenLogprobs | None]:
        counts = [self._num_logprobs.get(sequence.stream) for sequence in sampling]
        return [
            None if count is None else self._make_up_logprobs(token, count)
            for token, count in zip(token_ids, counts, strict=True)
        ]

    def _make_up_logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The drawn token has probability 1/2, each runner-up half of the one before."""
        others = [word for word in self._words[: count + 1] if word != token]
        top_ids = [token, *others][:count]
        return TokenLogprobs(_LN_HALF, 1, top_ids, [_LN_HALF * (number + 1) for number in range(len(top_ids))])
