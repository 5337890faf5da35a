"""What other frontends have at a worker, as its reports tell.

Every frontend says with each request how much of the prompt it expects to be cached; the worker adds that up by
frontend and tells all of them. So bookings are exchanged without frontends knowing each other: late by the interval of
reports, and gone with the frontend, whose sequences its workers end.
"""

from collections.abc import Iterable
from typing import NamedTuple

from headwater.protocol.events import FrontendLoad
from headwater.router.price import Occupied

_MOST_PAIRS = 1e15


class Foreign(NamedTuple):
    """Of all other frontends together."""

    num_prefilling: int
    num_decoding: int
    prefill_tokens: int
    prefill_pairs: float
    context_tokens: int

    @property
    def num_sequences(self) -> int:
        return self.num_prefilling + self.num_decoding


def foreign_work(frontends: Iterable[FrontendLoad], own_id: str) -> Foreign | None:
    """What is not our own; None for nothing. Numbers from outside are taken for what they can be."""
    others = [load for load in frontends if load.frontend_id != own_id]
    if not others:
        return None
    return Foreign(
        sum(max(0, load.num_prefilling) for load in others),
        sum(max(0, load.num_decoding) for load in others),
        sum(max(0, load.prefill_tokens) for load in others),
        sum(min(_MOST_PAIRS, max(0.0, load.prefill_pairs)) for load in others),
        sum(max(0, load.context_tokens) for load in others),
    )


class Both:
    """`Occupied`: a worker with our own requests and those of others."""

    def __init__(self, own: Occupied, foreign: Foreign) -> None:
        self.booked_prefill_tokens = own.booked_prefill_tokens + foreign.prefill_tokens
        self.booked_prefill_pairs = own.booked_prefill_pairs + foreign.prefill_pairs
        self.num_prefilling = own.num_prefilling + foreign.num_prefilling
        self.num_decoding = own.num_decoding + foreign.num_decoding
        self.booked_context_tokens = own.booked_context_tokens + foreign.context_tokens
        # Others do not say how much was cached of what they have; taken to be as much as of our own.
        new_share = own.booked_kv_tokens / own.booked_context_tokens if own.booked_context_tokens else 1.0
        self.booked_kv_tokens = own.booked_kv_tokens + int(new_share * foreign.context_tokens)
        self.speed_factor = own.speed_factor
