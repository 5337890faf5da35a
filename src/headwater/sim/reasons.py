"""Why one way of serving beats another, in words: where the milliseconds of a request go, and who waits for whom."""

from collections.abc import Iterator

from headwater.planner.objective import Objective
from headwater.sim.advice import Figures

_PARTS = {
    "queued_ms": "waiting for a prefill to begin",
    "prefill_ms": "computing its own prompt",
    "handoff_ms": "moving KV to the decode worker",
    "decode_ms": "decode steps",
    "stalled_ms": "standing still while prompts of others are computed",
}
_IDLE = 0.6
_WORTH_SAYING = 0.04
_EQUAL = 0.005


def verdict(best: Figures, other: Figures, objective: Objective) -> str:
    """By how much."""
    if objective.given and best.attained > other.attained + _EQUAL:
        factor = f", {best.attained / other.attained:.2f} times as many" if other.attained > 0.01 else ""
        return (
            f"{best.attained:.0%} of requests meet their objectives with {best.name}, "
            f"{other.attained:.0%} with {other.name}{factor}"
        )
    gain = 1 - best.e2e_ms / other.e2e_ms
    if abs(gain) < _EQUAL * 2:
        return f"{best.name} and {other.name} are equal within 1 %"
    return f"a request takes {_ms(best.e2e_ms)} with {best.name}, {_ms(other.e2e_ms)} with {other.name} ({-gain:+.0%})"


def where(figures: Figures) -> str:
    """Of one option: what a request's time is made of."""
    times = figures.times
    first = f"first token after {_ms(figures.ttft_ms)}"
    first += f" ({_ms(times.queued_ms)} waiting, {_ms(times.prefill_ms)} prefill, {_ms(times.handoff_ms)} hand-off)"
    later = times.decode_ms + times.stalled_ms
    stalled = times.stalled_ms / later if later > 0 else 0.0
    each = f"then {figures.tpot_ms:.1f} ms a token"
    if stalled > 0.02:
        each += f", of which {figures.tpot_ms * stalled:.1f} ms stand still while prompts of others are computed"
    return f"{figures.name}: {first}, {each}"


def reasons(best: Figures, other: Figures, objective: Objective) -> Iterator[str]:
    """Why `best` is better, the weightiest first."""
    yield from _missed(other, objective)
    yield from _difference(best, other)
    yield from _idle(other)


def _missed(figures: Figures, objective: Objective) -> Iterator[str]:
    if figures.tpot_ms > objective.tpot_ms:
        yield f"{figures.name}: {figures.tpot_ms:.1f} ms a token where {objective.tpot_ms:g} are asked for"
    if figures.ttft_ms > objective.ttft_ms:
        yield f"{figures.name}: {_ms(figures.ttft_ms)} to the first token where {_ms(objective.ttft_ms)} are asked for"


def _difference(best: Figures, other: Figures) -> Iterator[str]:
    """Which parts of a request's time differ."""
    differences = {words: getattr(other.times, name) - getattr(best.times, name) for name, words in _PARTS.items()}
    total = sum(abs(value) for value in differences.values())
    told = sorted(differences.items(), key=lambda pair: -abs(pair[1]))
    parts = [
        f"{_ms(abs(value))} {'more' if value > 0 else 'less'} {words}"
        for words, value in told
        if total > 0 and abs(value) > _WORTH_SAYING * total
    ]
    if parts:
        yield f"against {best.name}, a request at {other.name} spends {', '.join(parts)}"


def _idle(figures: Figures) -> Iterator[str]:
    """A split that does not fit: one side waits for the other."""
    if figures.kind != "split":
        return
    prefill, decode = figures.prefill_busy, figures.decode_busy
    for idle, idle_name, busy, busy_name in (
        (prefill, "prefill", decode, "decode"),
        (decode, "decode", prefill, "prefill"),
    ):
        if idle < _IDLE and idle < busy - 0.15:
            yield (
                f"{figures.name} fits badly: its {idle_name} workers compute {idle:.0%} of the time, its {busy_name} "
                f"workers {busy:.0%}"
            )


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"
