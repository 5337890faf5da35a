"""Draws the next token of every sampling row of a step.

A batch of plain greedy rows is one argmax. Every other row is adjusted and drawn on its own in host memory, with
operations that do not depend on its neighbours. Log-probabilities are those of the adjusted logits, before temperature
and cuts; tokens that are masked out are not reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.engines.native.sampling.draw import RowSampler
from headwater.engines.native.sampling.state import SamplingState
from headwater.engines.native.structured.base import DeadEndError
from headwater.protocol.request import TokenLogprobs


class BadLogitsError(Exception):
    """A row of logits from which nothing can be drawn."""


@dataclass(slots=True)
class Sampled:
    """Lists run over the rows. `failures`: why a row has no token (its entry in `token_ids` is 0)."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    failures: dict[int, str] = field(default_factory=dict[int, str])


class Sampler:
    """Sampling for one vocabulary size. Not for use from two threads."""

    def __init__(self, vocab_size: int) -> None:
        self._row = RowSampler(vocab_size)

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> Sampled:
        """Draw one token per row of float32 logits [R, V]. The logits are changed in place."""
        if not states:
            return Sampled([])
        simple = all(state.greedy and state.plain and state.logprobs is None for state in states)
        if simple and logits.device.type != "cpu":
            return _finish_greedy(*(part.cpu().numpy() for part in logits.max(dim=-1)[::-1]))
        rows: NDArray[np.float32] = logits.cpu().numpy()
        if simple:
            best = rows.argmax(axis=-1)
            return _finish_greedy(best, rows[np.arange(len(best)), best])
        return self._sample_rows(rows, states)

    def _sample_rows(self, rows: NDArray[np.float32], states: Sequence[SamplingState]) -> Sampled:
        sampled = Sampled([0] * len(states))
        if any(state.logprobs is not None for state in states):
            sampled.logprobs = [None] * len(states)
        for number, (row, state) in enumerate(zip(rows, states, strict=True)):
            try:
                sampled.token_ids[number], logprobs = self._sample_row(row, state)
            except (DeadEndError, BadLogitsError) as error:
                sampled.failures[number] = str(error)
                continue
            if sampled.logprobs is not None:
                sampled.logprobs[number] = logprobs
        return sampled

    def _sample_row(self, row: NDArray[np.float32], state: SamplingState) -> tuple[int, TokenLogprobs | None]:
        if not state.plain:
            state.adjust(row)
        best = int(row.argmax())
        peak = row[best]
        if not np.isfinite(peak):
            raise BadLogitsError(_bad_logits(float(peak)))
        self._row.load(row, peak)
        token = best if state.greedy else self._row.draw(state.cuts, state.temperature, state.uniform())
        return token, None if state.logprobs is None else self._logprobs(row, token, state.logprobs)

    def _logprobs(self, row: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
        own, log_total = float(row[token]), self._row.log_total()
        rank = 1 + int(np.count_nonzero(row > row[token]))
        if count == 0:
            return TokenLogprobs(own - log_total, rank)
        largest = self._row.largest()
        top_logprobs = (largest.values[:count].astype(np.float64) - log_total).tolist()
        return TokenLogprobs(own - log_total, rank, largest.token_ids[:count].tolist(), top_logprobs)


def _finish_greedy(token_ids: NDArray[np.intp], peaks: NDArray[np.float32]) -> Sampled:
    sampled = Sampled(token_ids.tolist())
    for number in np.flatnonzero(~np.isfinite(peaks)).tolist():
        sampled.failures[number] = _bad_logits(float(peaks[number]))
    return sampled


def _bad_logits(peak: float) -> str:
    return "all tokens are masked out" if peak == -np.inf else f"the model produced a logit of {peak}"
