"""How the prefill tokens of one step are shared: first come first served, but a long prompt lends.

The most senior prompt that cannot finish in this step is the long one. It lends up to half of its tokens to juniors
that do finish with them, and gets back what they leave. So a short prompt does not wait for a long one to end, a long
one is at most half as fast for it, and prompts that are all long go one after the other. Parts end at block borders.
"""

from headwater.scheduler.entry import Entry

Prefill = tuple[Entry, int]
"""A sequence and how many of its tokens to compute."""


class PrefillBudget:
    """`offer` and `take` in order of seniority, then `shares`."""

    def __init__(self, num_tokens: int, block_size: int) -> None:
        self._left = num_tokens
        """For those who come next."""
        self._withheld = 0
        """Kept for the long one."""
        self._block_size = block_size
        self._shares: list[Prefill] = []
        self._long: int | None = None

    def offer(self, num_remaining: int) -> int:
        """Tokens for a sequence that has so many left to compute; 0: none in this step."""
        if num_remaining <= self._left:
            return num_remaining
        return self._whole_blocks(self._left) if self._long is None else 0

    def take(self, entry: Entry, num_tokens: int, num_remaining: int) -> None:
        """Accept an offer."""
        if num_tokens < num_remaining:
            self._long = len(self._shares)
            self._withheld = num_tokens - self._whole_blocks(num_tokens // 2)
            self._left -= self._withheld
        else:
            self._left -= num_tokens
        self._shares.append((entry, num_tokens))

    def shares(self) -> list[Prefill]:
        """What was taken, the long one's share being what the others left."""
        if self._long is not None:
            entry, _ = self._shares[self._long]
            self._shares[self._long] = (entry, self._withheld + self._whole_blocks(self._left))
        return self._shares

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._block_size
