"""What one sequence brings to sampling: checked parameters, and counts that follow its tokens.

Everything here is a function of the request and of the tokens so far, so it can be rebuilt at any moment: after a
preemption, or on another worker. Logits are changed in this order: grammar mask, min_tokens, logit_bias, repetition
penalty (prompt and output), frequency and presence penalties (output).
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headwater.engines.native.sampling.draw import MAX_TOP, Cuts
from headwater.engines.native.sampling.philox import uniforms
from headwater.engines.native.structured.base import TokenConstraint
from headwater.errors import InvalidRequest
from headwater.protocol.request import SamplingParams
from headwater.scheduler.plan import Sequence

_GREEDY_BELOW = 1e-5
"""Temperatures this small mean greedy: the reciprocal would overflow."""

_DRAWS_PER_BATCH = 64

MAX_LOGPROBS = MAX_TOP


class TokenCounts:
    """How often each token was seen: a growing table that can be applied to a row in one go."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._token_ids = np.zeros(64, dtype=np.intp)
        self._counts = np.zeros(64, dtype=np.float32)

    @property
    def token_ids(self) -> NDArray[np.intp]:
        return self._token_ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Occurrences in the output; 0 for tokens seen in the prompt only."""
        return self._counts[: len(self._slots)]

    def mark(self, tokens: Iterable[int]) -> None:
        """Tokens seen in the prompt."""
        for token in set(tokens):
            self._slot(token)

    def count(self, tokens: Iterable[int]) -> None:
        """Tokens seen in the output."""
        for token, times in Counter(tokens).items():
            slot = self._slot(token)
            self._counts[slot] += times

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = len(self._slots)
            if slot == len(self._token_ids):
                self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._slots[token] = slot
            self._token_ids[slot] = token
        return slot


class SamplingState:
    """Sampling of one sequence, whose parameters have been checked."""

    def __init__(
        self,
        sequence: Sequence,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        constraint: TokenConstraint | None = None,
    ) -> None:
        params = sequence.request.sampling
        self.greedy = params.temperature < _GREEDY_BELOW
        self.temperature = 1.0 if self.greedy else params.temperature
        self.cuts = Cuts(params.top_k if params.top_k < vocab_size else 0, params.top_p, params.min_p)
        self.logprobs = params.logprobs
        self.constraint = constraint
        self._sequence = sequence
        self._params = params
        end_token_ids = set(params.stop_token_ids).union(() if params.goes_past_end else eos_token_ids)
        self._end_token_ids = np.array(sorted(end_token_ids), dtype=np.intp)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.intp)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._counts = self._new_counts()
        self._num_counted = sequence.num_prompt_tokens
        self._first_uniform = -1
        self._uniforms: list[float] = []
        self.plain = constraint is None and self._counts is None and not params.logit_bias and params.min_tokens == 0

    def _new_counts(self) -> TokenCounts | None:
        params = self._params
        if params.repetition_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0:
            return None
        counts = TokenCounts()
        if params.repetition_penalty != 1:
            counts.mark(self._sequence.token_ids[: self._sequence.num_prompt_tokens])
        return counts

    def uniform(self) -> float:
        """The random number of the next position."""
        batch, offset = divmod(self._sequence.num_tokens, _DRAWS_PER_BATCH)
        if batch * _DRAWS_PER_BATCH != self._first_uniform:
            self._first_uniform = batch * _DRAWS_PER_BATCH
            self._uniforms = uniforms(self._params.seed, self._first_uniform, _DRAWS_PER_BATCH).tolist()
        return self._uniforms[offset]

    def adjust(self, logits: NDArray[np.float32]) -> None:
        """Apply masks, biases and penalties to the row in place."""
        complete = False
        if self.constraint is not None:
            self.constraint.advance(self._output_tokens(self.constraint.num_tokens))
            self.constraint.mask(logits)
            complete = self.constraint.complete
        if self._sequence.num_output_tokens < self._params.min_tokens and not complete:
            logits[self._end_token_ids] = -np.inf
        if len(self._bias_ids):
            logits[self._bias_ids] += self._bias
        if self._counts is not None:
            self._penalise(logits, self._counts)

    def _penalise(self, logits: NDArray[np.float32], counts: TokenCounts) -> None:
        counts.count(self._sequence.token_ids[self._num_counted :])
        self._num_counted = self._sequence.num_tokens
        params = self._params
        values = logits[counts.token_ids]
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        values -= np.float32(params.frequency_penalty) * counts.counts
        values -= np.float32(params.presence_penalty) * (counts.counts > 0)
        logits[counts.token_ids] = values

    def _output_tokens(self, start: int) -> "array[int]":
        return self._sequence.token_ids[self._sequence.num_prompt_tokens + start :]


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse values outside their range, naming the field."""
    _within("temperature", params.temperature, 0.0, 100.0)
    _within("top_p", params.top_p, 0.0, 1.0)
    if params.top_p == 0:
        raise InvalidRequest("top_p is 0; it must be above 0 and at most 1", param="top_p")
    _within("top_k", params.top_k, 0, math.inf)
    _within("min_p", params.min_p, 0.0, 1.0)
    _within("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _within("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _within("repetition_penalty", params.repetition_penalty, 1e-6, 100.0)
    _within("max_tokens", params.max_tokens, 1, math.inf)
    _within("min_tokens", params.min_tokens, 0, params.max_tokens)
    if params.logprobs is not None:
        _within("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    for token, bias in params.logit_bias.items():
        _token("logit_bias", token, vocab_size)
        _within("logit_bias", bias, -100.0, 100.0)
    for token in params.stop_token_ids:
        _token("stop_token_ids", token, vocab_size)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        bounds = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise InvalidRequest(f"{name} is {value}; it must be {bounds}", param=name)


def _token(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{name} names token {token}; the vocabulary has tokens 0 to {vocab_size - 1}", param=name)
