"""What a placement costs, in milliseconds: the delay it will suffer and the delay it inflicts.

For a request with u prompt tokens to compute on a worker that has B booked ones, q sequences before their first token
and n decoding over K tokens of context, with T and d the predicted prefill and decode-step times, D = T(B+u) - T(B) and
N the expected output length:

    first token   T(B+u) + chunks x d              the steps before the first token
    own decode    N x d after                      the steps after it
    successors    prefills of q + n                sequences leave and others come: while this one decodes, it stands
                                                   still for as many prefills as there are sequences now
    stall         D x (n + q)                      those who run or wait here stand still meanwhile; who has waited
                                                   for prefills more than others counts more (`headwater.router.even`)
    slow-down     (d after - d before) x N x (n/2 + q)   and decode slower afterwards, for half their rest
    worker time   D                                a shadow price: time and cache this takes from later ones, the
                                                   dearer the more sequences run and the fuller caches are
    home          a small discount where the prefix is at home, so that cold prefixes always fall the same way

Each part has a weight; a `Profile` is a set of weights. What all workers share does not decide, so common errors of
the time model cancel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from typing import NamedTuple, Protocol, Self

from headwater.errors import ConfigError
from headwater.perf.prior import USUAL


@dataclass(frozen=True, slots=True)
class Profile:
    """Weights of the parts of a price; that of the first token is 1."""

    own_decode: float
    successors: float
    stall: float
    """Of those who wait for their first token, ..."""
    stall_decoding: float
    """... and of those who decode."""
    even_crowd: float
    """What each sequence of a typical worker adds to the share of that which goes by what they have waited already."""
    slow_down: float
    worker_time: float
    """Of a ms of added prefill on idle workers whose caches have room, ..."""
    crowd_time: float
    """... what each sequence of a typical worker adds to it, ..."""
    churn_time: float
    """... and what is added to it when every new block displaces another."""
    home_share: float
    """Of the prefill time of a cold prompt, at most `home_ms`."""
    home_ms: float


END_TO_END = Profile(
    own_decode=0.25,
    successors=0.4,
    stall=0.35,
    stall_decoding=0.3,
    even_crowd=1 / 16,
    slow_down=0.25,
    worker_time=0.75,
    crowd_time=0.15,
    churn_time=2.5,
    home_share=0.1,
    home_ms=30.0,
)
"""A ms before the first token counts as two after it."""
FIRST_TOKEN = Profile(
    own_decode=0.0,
    successors=0.0,
    stall=0.25,
    stall_decoding=0.075,
    even_crowd=0.0,
    slow_down=0.0,
    worker_time=0.5,
    crowd_time=0.0,
    churn_time=1.5,
    home_share=0.1,
    home_ms=30.0,
)


def profile(decode_share: float) -> Profile:
    """Between `FIRST_TOKEN` (0) and `END_TO_END` (1): how much the time after the first token matters."""
    if not 0.0 <= decode_share <= 1.0:
        raise ConfigError(f"the share of decode time in the objective is {decode_share}: from 0 to 1")
    names = [field.name for field in fields(Profile)]
    ends = [(getattr(FIRST_TOKEN, name), getattr(END_TO_END, name)) for name in names]
    return Profile(*[first + decode_share * (whole - first) for first, whole in ends])


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Time of one engine step by what is in it, for one class of workers. See `headwater.perf.model`."""

    prefill_step_ms: float
    """Constant of a step that prefills."""
    prefill_token_ms: float
    prefill_pair_ms: float
    decode_step_ms: float
    """Constant of a step that decodes."""
    decode_sequence_ms: float
    decode_context_token_ms: float
    chunk_tokens: int
    spread: float = 0.0
    """How far apart workers of the class measure, relative: smaller differences of a price mean nothing."""

    @classmethod
    def of(cls, coefficients: Sequence[float], chunk_tokens: int, spread: float = 0.0) -> Self:
        """From c0 to c6 of the learned model."""
        step, prefill, per_token, per_pair, decode, per_sequence, per_context = coefficients
        return cls(step + prefill, per_token, per_pair, step + decode, per_sequence, per_context, chunk_tokens, spread)

    def prefill_ms(self, tokens: float, pairs: float) -> float:
        """Time of prefilling `tokens` that attend to `pairs`, in full chunks."""
        if tokens <= 0:
            return 0.0
        steps = math.ceil(tokens / self.chunk_tokens)
        return steps * self.prefill_step_ms + self.prefill_token_ms * tokens + self.prefill_pair_ms * pairs

    def prefills_ms(self, prompts: int, tokens: int) -> float:
        """Time of so many prefills of so many tokens together, but for what grows with context. None are none: the
        prompts were computed elsewhere."""
        return self.prefill_step_ms * prompts + self.prefill_token_ms * tokens if tokens else 0.0

    def decode_ms(self, sequences: float, context_tokens: float) -> float:
        return self.decode_step_ms + self.decode_sequence_ms * sequences + self.decode_context_token_ms * context_tokens


UNKNOWN = StepCosts.of(USUAL.coefficients, chunk_tokens=2048)
"""For workers that no step time is known of."""


class Occupied(Protocol):
    """What a worker already has to do. `WorkerView` is one."""

    @property
    def booked_prefill_tokens(self) -> int: ...

    @property
    def booked_prefill_pairs(self) -> float:
        """Tokens that the booked prefill tokens attend to, summed."""
        ...

    @property
    def num_prefilling(self) -> int:
        """Sequences before their first token."""
        ...

    @property
    def num_decoding(self) -> int: ...

    @property
    def booked_context_tokens(self) -> int: ...

    @property
    def booked_kv_tokens(self) -> int:
        """Prompt tokens of the sequences that have not ended, less what was cached of each when it came."""
        ...

    @property
    def speed_factor(self) -> float:
        """How much slower than its class; applied to its own queue only."""
        ...


class Occupancy(NamedTuple):
    """What a worker had to do at one moment. Implements `Occupied`, with what depends on nothing else worked out."""

    costs: StepCosts
    booked_prefill_tokens: int
    booked_prefill_pairs: float
    num_prefilling: int
    num_decoding: int
    booked_context_tokens: int
    booked_kv_tokens: int
    speed_factor: float
    backlog_ms: float
    """Time of the booked prefill."""
    step_ms: float
    """Time of a decode step with all its sequences in it."""
    successors_ms: float
    """Time of one prefill for each sequence, like its own."""

    @classmethod
    def of(cls, costs: StepCosts, worker: Occupied) -> "Occupancy":
        tokens, pairs = worker.booked_prefill_tokens, worker.booked_prefill_pairs
        prefilling, decoding, context = worker.num_prefilling, worker.num_decoding, worker.booked_context_tokens
        return cls(
            costs,
            tokens,
            pairs,
            prefilling,
            decoding,
            context,
            worker.booked_kv_tokens,
            worker.speed_factor,
            costs.prefill_ms(tokens, pairs),
            costs.decode_ms(prefilling + decoding, context),
            costs.prefills_ms(prefilling + decoding, worker.booked_kv_tokens),
        )


class Placement(NamedTuple):
    """One request, as all workers see it."""

    prompt_tokens: int
    num_sequences: int
    expected_output_tokens: float
    churn: float
    """Blocks displaced per block stored, lately."""
    crowd: int
    """Sequences of the worker in the middle."""


class Price(NamedTuple):
    """Parts of a price in ms, weighted; they add up to the total."""

    first_token: float
    own_decode: float
    successors: float
    stall: float
    slow_down: float
    worker_time: float


def prefill_pairs(new_tokens: int, cached_tokens: int) -> float:
    """Tokens attended to, summed over `new_tokens` that follow `cached_tokens`."""
    return new_tokens * (cached_tokens + (new_tokens + 1) / 2)


def price(
    costs: StepCosts,
    weights: Profile,
    worker: Occupied,
    placement: Placement,
    cached_tokens: int,
    unevenness: float = 0.0,
) -> Price:
    """The price of one placement, away from home. `unevenness`: see `headwater.router.even`."""
    prompt_tokens, num_sequences, rest, churn, crowd = placement
    new_tokens = prompt_tokens - cached_tokens
    backlog_tokens, backlog_pairs = worker.booked_prefill_tokens, worker.booked_prefill_pairs
    prefilling, decoding = worker.num_prefilling, worker.num_decoding
    backlog_ms = costs.prefill_ms(backlog_tokens, backlog_pairs)
    tokens = backlog_tokens + new_tokens
    prefill_ms = costs.prefill_ms(tokens, backlog_pairs + prefill_pairs(new_tokens, cached_tokens))
    added_ms = prefill_ms - backlog_ms
    context = worker.booked_context_tokens
    slower_ms = costs.decode_sequence_ms * num_sequences + costs.decode_context_token_ms * prompt_tokens
    before_ms = costs.decode_ms(prefilling + decoding, context)
    first_token_ms = prefill_ms + (worker.speed_factor - 1.0) * backlog_ms
    successors_ms = 0.0
    if prefilling or decoding:
        first_token_ms += before_ms * math.ceil(tokens / costs.chunk_tokens)
        successors_ms = costs.prefills_ms(prefilling + decoding, worker.booked_kv_tokens)
    return Price(
        first_token_ms,
        weights.own_decode * rest * (before_ms + slower_ms),
        weights.successors * successors_ms,
        added_ms * (weights.stall_decoding * (decoding + unevenness) + weights.stall * prefilling),
        weights.slow_down * slower_ms * (rest / 2) * (decoding / 2 + prefilling),
        (weights.worker_time + weights.churn_time * churn + weights.crowd_time * crowd) * added_ms,
    )


def totals(
    weights: Profile,
    workers: Sequence[Occupancy],
    placement: Placement,
    cached_tokens: Sequence[int],
    unevenness: Sequence[float] | None = None,
) -> list[float]:
    """`sum(price(...))` for each worker, but for rounding: one loop, as every request pays it for every worker."""
    prompt_tokens, num_sequences, rest, churn, crowd = placement
    decode_weight, successor_weight = weights.own_decode * rest, weights.successors
    stall_weight, stall_decoding_weight = weights.stall, weights.stall_decoding
    slow_weight, half_rest = weights.slow_down, rest / 2
    time_weight = weights.worker_time + weights.churn_time * churn + weights.crowd_time * crowd
    cold_pairs = prefill_pairs(prompt_tokens, 0)
    known = None
    found: list[float] = []
    for (
        (costs, tokens, pairs, prefilling, decoding, _, _, speed, backlog_ms, step_ms, successors_ms),
        cached,
        uneven,
    ) in zip(workers, cached_tokens, unevenness or repeat(0.0, len(workers)), strict=True):
        if costs is not known:
            known, chunk_tokens, chunk_ms = costs, costs.chunk_tokens, costs.prefill_step_ms
            token_ms, pair_ms = costs.prefill_token_ms, costs.prefill_pair_ms
            slower_ms = costs.decode_sequence_ms * num_sequences + costs.decode_context_token_ms * prompt_tokens
        new = prompt_tokens - cached
        tokens += new
        pairs += new * (cached + (new + 1) / 2) if cached else cold_pairs
        chunks = -(-tokens // chunk_tokens)
        first_ms = chunks * chunk_ms + token_ms * tokens + pair_ms * pairs
        added_ms = first_ms - backlog_ms
        if speed != 1.0:
            first_ms += (speed - 1.0) * backlog_ms
        total = decode_weight * (step_ms + slower_ms) + time_weight * added_ms
        if prefilling or decoding:
            first_ms += step_ms * chunks
            total += (
                successor_weight * successors_ms
                + added_ms * (stall_decoding_weight * (decoding + uneven) + stall_weight * prefilling)
                + slow_weight * slower_ms * half_rest * (decoding / 2 + prefilling)
            )
        found.append(first_ms + total)
    return found
