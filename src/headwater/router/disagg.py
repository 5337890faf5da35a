"""Whether a prompt is computed by the worker that decodes it or by another one, inside the plan of roles.

The decode worker is chosen first, as ever. Then every prefill worker is priced like a route: waiting and computing
there, what of the hand-off is not hidden behind the computing, and the delay to those that wait there. Computing at
the decode worker costs its own time and, for every sequence that decodes there, standing still meanwhile. Among equal
prices the prefill worker that was sent least is taken, as in `headwater.router.delay`: so all caches of a pool fill.

    role of the decode worker     prefill workers there are      where
    both                          none                           there
    both                          some                           the cheaper
    decode                        some                           a prefill worker, unless what is left to compute is
                                                                 not worth a hand-off or a small part of what that
                                                                 one would compute, or the plan is loose; and
                                                                 computing there is cheaper

Prefill for others is done by workers of role `prefill` only. These hold no room for sequences of others, so no circle
of workers that wait for each other's room can form. `always`, `never` and `threshold` ignore prices and the plan. A
decode worker whose engine works in pairs computes no prompt, whatever is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from headwater.errors import ConfigError
from headwater.router.price import Occupancy, prefill_pairs
from headwater.router.request import RouteRequest
from headwater.router.worker import WorkerView

Mode = Literal["plan", "always", "never", "threshold"]
MODES: tuple[Mode, ...] = get_args(Mode)

NOTICE_MS = 2.0
"""From the last byte to the first step that decodes."""
HIDDEN_PARTS = 4
"""What is computed is moved in about so many parts meanwhile; the last one shows."""
_STALL_WAITING = 0.4
_SMALL_PART = 0.25
"""A decode worker that has to compute less than this part of what a prefill worker would may do so, if cheaper."""


@dataclass(frozen=True, slots=True)
class DisaggSettings:
    """What an operator may say about where prompts are computed."""

    mode: Mode = "plan"
    threshold_tokens: int = 512
    """In mode `threshold`: prompts with as many tokens left to compute go to prefill workers."""
    link_bytes_per_ms: float = 10e6
    """Believed speed of KV on its way between workers."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"no way to decide is called {self.mode!r}", hint=f"one of {', '.join(MODES)}")


class PrefillPrice(NamedTuple):
    """What it costs to compute a prompt somewhere. The parts, in ms, add up to the total."""

    own_ms: float
    """Until it is computed: waiting included."""
    handoff_ms: float
    inflicted_ms: float
    """On those that wait or decode there."""


@dataclass(frozen=True, slots=True)
class PrefillOption:
    """One place where the prompt could be computed."""

    worker_id: str
    price: PrefillPrice
    cached_tokens: int

    @property
    def total_ms(self) -> float:
        return sum(self.price)


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """Where a prompt is computed, and why."""

    chosen: PrefillOption
    remote: bool
    reason: str
    options: tuple[PrefillOption, ...] = ()
    """The decode worker's own first."""

    def describe(self) -> dict[str, object]:
        """As JSON shows it."""
        return {
            "prefill_worker_id": self.chosen.worker_id,
            "remote": self.remote,
            "reason": self.reason,
            "options": [
                {
                    "worker_id": option.worker_id,
                    **{name: round(part_ms, 3) for name, part_ms in option.price._asdict().items()},
                    "cached_tokens": option.cached_tokens,
                }
                for option in self.options
            ],
        }


def choose_prefill(
    settings: DisaggSettings, request: RouteRequest, decoder: WorkerView, prefillers: Sequence[WorkerView], loose: bool
) -> PrefillChoice:
    """`prefillers`: those that can take requests now."""
    here = _local(request, decoder)
    if not prefillers or (settings.mode == "never" and not decoder.instance.paired):
        return PrefillChoice(here, False, "there are no prefill workers" if not prefillers else "never asked for")
    if decoder.instance.role == "prefill":
        return PrefillChoice(here, False, "no worker decodes: a prefill worker does all of it")
    there = [_remote(settings, request, decoder, worker) for worker in prefillers]
    best, _ = min(zip(there, prefillers, strict=True), key=lambda pair: (pair[0].total_ms, pair[1].sent_tokens))
    if decoder.instance.paired:
        return PrefillChoice(best, True, "its engine computes no prompts", (here, *there))
    remote, reason = _decide(settings, request, decoder, here, best, loose)
    return PrefillChoice(best if remote else here, remote, reason, (here, *there))


def _decide(
    settings: DisaggSettings,
    request: RouteRequest,
    decoder: WorkerView,
    here: PrefillOption,
    there: PrefillOption,
    loose: bool,
) -> tuple[bool, str]:
    left = request.num_prompt_tokens - here.cached_tokens
    match settings.mode:
        case "always":
            return True, "always asked for"
        case "threshold":
            return left >= settings.threshold_tokens, f"{left} tokens to compute, threshold {settings.threshold_tokens}"
        case _:
            pass
    if here.price.own_ms <= there.price.handoff_ms:
        return False, "computing what is left takes no longer than a hand-off"
    cheaper = there.total_ms < here.total_ms
    if decoder.instance.role == "both" or loose:
        return cheaper, "the cheaper of both"
    if not cheaper and left <= _SMALL_PART * (request.num_prompt_tokens - there.cached_tokens):
        return False, "most of it is cached here and not there"
    return True, "the plan"


def _local(request: RouteRequest, worker: WorkerView) -> PrefillOption:
    cached = _cached_tokens(request, worker)
    price = price_here(worker.occupied or worker.occupy(), request.num_prompt_tokens - cached, cached)
    return PrefillOption(worker.worker_id, price, cached)


def _remote(settings: DisaggSettings, request: RouteRequest, decoder: WorkerView, worker: WorkerView) -> PrefillOption:
    cached = _cached_tokens(request, worker)
    missing = request.num_prompt_tokens - request.cached_tokens.get(decoder.worker_id, 0)
    moved_ms = missing * decoder.instance.card.kv_bytes_per_token / settings.link_bytes_per_ms
    price = price_elsewhere(worker.occupied or worker.occupy(), request.num_prompt_tokens - cached, cached, moved_ms)
    return PrefillOption(worker.worker_id, price, cached)


def _cached_tokens(request: RouteRequest, worker: WorkerView) -> int:
    return min(request.cached_tokens.get(worker.worker_id, 0), request.num_prompt_tokens - 1)


def price_here(occupied: Occupancy, new_tokens: int, cached_tokens: int) -> PrefillPrice:
    """At the worker that decodes."""
    own_ms, added_ms, chunks = _times(occupied, new_tokens, cached_tokens)
    if occupied.num_decoding or occupied.num_prefilling:
        own_ms += occupied.step_ms * chunks
    return PrefillPrice(own_ms, 0.0, _inflicted_ms(occupied, added_ms))


def price_elsewhere(occupied: Occupancy, new_tokens: int, cached_tokens: int, moved_ms: float) -> PrefillPrice:
    """At another worker, from which what is moved then takes so long."""
    own_ms, added_ms, _ = _times(occupied, new_tokens, cached_tokens)
    if occupied.num_decoding:
        own_ms += occupied.step_ms
    handoff_ms = NOTICE_MS + moved_ms / HIDDEN_PARTS + max(0.0, moved_ms - added_ms)
    return PrefillPrice(own_ms, handoff_ms, _inflicted_ms(occupied, added_ms))


def _times(occupied: Occupancy, new_tokens: int, cached_tokens: int) -> tuple[float, float, int]:
    """(until it is computed, what of that is its own, steps until then)."""
    costs = occupied.costs
    tokens = occupied.booked_prefill_tokens + new_tokens
    after = costs.prefill_ms(tokens, occupied.booked_prefill_pairs + prefill_pairs(new_tokens, cached_tokens))
    waited_longer = (occupied.speed_factor - 1.0) * occupied.backlog_ms
    return after + waited_longer, after - occupied.backlog_ms, -(-tokens // costs.chunk_tokens)


def _inflicted_ms(occupied: Occupancy, added_ms: float) -> float:
    return added_ms * (occupied.num_decoding + _STALL_WAITING * occupied.num_prefilling)
