"""How long a decode worker waits for a prefill worker before it computes the prompt itself.

A remote prefill that takes twice as long as expected has lost against a local one, most of the time; so the bounds are
a small multiple of what was expected, and a floor for what a busy machine does to small times.

Time in line is another matter: whoever chose the worker may not have known of the line, but everybody who gave up
there would only move it here. So while the prefill worker says that it goes on and will come to it, the wait is worth
it unless computing here is cheaper by far, or the only way to be in time.
"""

from dataclasses import dataclass
from math import inf

from headwater.protocol.request import RemotePrefill

MAX_HOLD_S = 3600.0
"""Longest time that blocks are kept for a reader."""
_FACTOR = 2.5
_FLOOR_S = 2.0
_STALL_FLOOR_S = 2.0
_UNKNOWN_S = 15.0
"""When nothing is known of the peer yet, ..."""
_UNKNOWN_PER_TOKEN_S = 0.01
"""... and per token of the prompt."""
_SLACK_S = 5.0
_LONGEST_FLOOR_S = 60.0
_LONGEST_FACTOR = 4.0
_OLD_SHARE = 0.8
_HOPELESS = 1.5
_LEAST_SEEN_S = 0.5


@dataclass(frozen=True, slots=True)
class Patience:
    """In seconds from the asking on."""

    total_s: float
    """To the first token."""
    stall_s: float
    """Without a word about this request."""
    longest_s: float = 0.0
    """Bound of `total_s`, should it grow by time in line; less than that: it does not grow."""

    @property
    def hold_s(self) -> float:
        """How long the prefill worker keeps blocks: as long as the reader may still read them."""
        return max(self.total_s, self.longest_s) + _SLACK_S

    def in_line(self, at_s: float, silence_s: float) -> "Patience":
        """From a word that it is in line, so long after the asking: only now the time to compute it begins.

        `silence_s`: what may pass until the next word where steps take long.
        """
        total_s = max(self.total_s, min(at_s + self.total_s, self.longest_s))
        return Patience(total_s, min(max(self.stall_s, silence_s), total_s), self.longest_s)


@dataclass(frozen=True, slots=True)
class Prospects:
    """Of a prompt that waits in line elsewhere, in seconds from now on; 0: no idea."""

    there_s: float
    here_s: float
    """If it were computed here; a price, so more if that holds others up."""
    deadline_s: float = inf
    as_expected: bool = False
    """It comes no later than whoever chose that worker expected, and that one knew of the line."""

    @property
    def better_here(self) -> bool:
        if not (self.there_s > 0 and self.here_s > 0):
            return False
        if self.there_s > self.deadline_s >= self.here_s:
            return True
        return not self.as_expected and self.there_s > _FLOOR_S + _FACTOR * self.here_s


def patience(expected_ms: float, num_tokens: int) -> Patience:
    """`expected_ms`: to the first token, waiting included; 0 when nobody knows. `num_tokens`: to be computed there."""
    if not 0 < expected_ms < MAX_HOLD_S * 1000:
        total_s = min(_UNKNOWN_S + num_tokens * _UNKNOWN_PER_TOKEN_S, MAX_HOLD_S - _SLACK_S)
        return Patience(total_s, total_s, _longest_s(total_s))
    total_s = min(_FLOOR_S + _FACTOR * expected_ms / 1000, MAX_HOLD_S - _SLACK_S)
    return Patience(total_s, max(_STALL_FLOOR_S, total_s / 2), _longest_s(total_s))


def _longest_s(total_s: float) -> float:
    return min(max(_LONGEST_FLOOR_S, _LONGEST_FACTOR * total_s), MAX_HOLD_S - _SLACK_S)


class Progress:
    """What a hand-off has come to, to see early that it will be too late."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        """To come."""
        self._first: tuple[float, int] | None = None
        self._now: tuple[float, int] = (0.0, 0)

    def announced(self, at_s: float, num_blocks: int) -> None:
        """More blocks can be read, so long after the asking."""
        total = self._now[1] + num_blocks
        self._now = (at_s, total)
        self._first = self._first or self._now

    def ends_s(self) -> float | None:
        """When all will have come, at the pace since the first ones came; None while there is no telling."""
        if self._first is None or self._now[0] - self._first[0] < _LEAST_SEEN_S:
            return None
        (first_s, first), (now_s, now) = self._first, self._now
        return now_s + (self._num_blocks - now) * (now_s - first_s) / (now - first)

    def hopeless(self, limit: Patience) -> bool:
        ends_s = self.ends_s()
        return ends_s is not None and ends_s > _HOPELESS * limit.total_s


class Pace:
    """What prompts took at one prefill worker so far, where nothing better is known."""

    def __init__(self) -> None:
        self._ms_per_token = 0.0

    def observe(self, num_tokens: int, took_ms: float) -> None:
        seen = took_ms / max(1, num_tokens)
        known = self._ms_per_token
        self._ms_per_token = seen if not known else _OLD_SHARE * known + (1 - _OLD_SHARE) * seen

    def expected_ms(self, num_tokens: int) -> float:
        """0: nothing was seen yet."""
        return self._ms_per_token * num_tokens


class Paces:
    """Of all prefill workers that this one has asked."""

    def __init__(self) -> None:
        self._by_worker: dict[str, Pace] = {}

    def observe(self, worker_id: str, num_tokens: int, took_ms: float) -> None:
        self._by_worker.setdefault(worker_id, Pace()).observe(num_tokens, took_ms)

    def expected_ms(self, where: RemotePrefill, num_tokens: int) -> float:
        """What the request says, or else what was seen; 0: nobody knows."""
        if where.expected_ms > 0:
            return where.expected_ms
        pace = self._by_worker.get(where.worker_id)
        return pace.expected_ms(num_tokens) if pace is not None else 0.0

    def forget(self, worker_id: str) -> None:
        self._by_worker.pop(worker_id, None)
