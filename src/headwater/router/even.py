"""The guard of long answers: among equals, prefills go where they have held up least so far.

A price that counts each decoding sequence alike lets prefills gather on some workers, which is good for the mean, while
a long answer that happens to be there waits for all of them. So the delay a prefill inflicts counts by what the
sequences of that worker have waited for prefills already, relative to the mean of all that decode; the more, the more
crowded workers are, since on idle ones gathering harms nobody. Over all workers together the weight is that of as many
sequences, so nothing is added to the price of a prefill, it is only moved.

Known of our own sequences; those of other frontends count for one each.
"""

from collections.abc import Sequence
from typing import Protocol

_LEAST_MS = 1.0
"""All of them together have waited for less: that is nothing to divide by."""


class Waiting(Protocol):
    """`WorkerView` is one."""

    @property
    def num_decoding(self) -> int: ...

    @property
    def held_up_ms(self) -> float:
        """Prefill time that its decoding sequences have waited for since their first tokens, summed."""
        ...


def unevenness(workers: Sequence[Waiting], share: float) -> list[float] | None:
    """By how many sequences each worker counts for more (or less) than it decodes; None: all for as many.

    `share`: from 0, each sequence counts for one, to 1, it counts for what it has waited over the mean.
    """
    if share <= 0.0:
        return None
    held_up_ms = [worker.held_up_ms for worker in workers]
    total_ms = sum(held_up_ms)
    if total_ms < _LEAST_MS:
        return None
    decoding = [worker.num_decoding for worker in workers]
    per_ms = sum(decoding) / total_ms
    return [share * (waited_ms * per_ms - count) for waited_ms, count in zip(held_up_ms, decoding, strict=True)]
