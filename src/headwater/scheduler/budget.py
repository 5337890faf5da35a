"""How the prefill tokens of one step are shared: first come first served, but long prompts lend to short ones.

A prompt that cannot finish in this step lends half of its tokens to juniors that finish with them, or that have at
most half as much left to compute as it has; such a junior lends on in the same way. What nobody borrows stays with
the last who lent it. So a short prompt does not wait for a long one to end, a long one is at most half as fast for it,
and prompts of a length go one after the other. Parts end at block borders.

A sequence may come with a bound on the tokens of the whole step (`EngineRequest.step_tokens`): it gets no more than
what those before it leave of that.
"""

from headwater.scheduler.entry import Entry

Prefill = tuple[Entry, int]
"""A sequence and how many of its tokens to compute."""


class PrefillBudget:
    """`offer` and `take` in order of seniority, then `shares`."""

    def __init__(self, num_tokens: int, block_size: int) -> None:
        self._size = num_tokens
        self._left = num_tokens
        """For those who come next."""
        self.num_refused = 0
        self._block_size = block_size
        self._shares: list[Prefill] = []
        self._lender: int | None = None
        """Place of the most junior one that does not finish."""
        self._most_remaining: float = float("inf")
        """What a borrower that does not finish may have left to compute."""

    def offer(self, num_remaining: int, step_tokens: int = 0) -> int:
        """Tokens for a sequence that has so many left to compute; 0: none in this step."""
        left = self._left_of(step_tokens)
        if num_remaining <= left:
            return num_remaining
        num_tokens = self._whole_blocks(left) if num_remaining <= self._most_remaining else 0
        if not num_tokens:
            self.num_refused += 1
        return num_tokens

    def take(self, entry: Entry, num_tokens: int, num_remaining: int) -> None:
        """Accept an offer."""
        if num_tokens < num_remaining:
            num_tokens -= self._whole_blocks(num_tokens // 2)
            self._lender = len(self._shares)
            self._most_remaining = num_remaining / 2
        self._left -= num_tokens
        self._shares.append((entry, num_tokens))

    def shares(self) -> list[Prefill]:
        """What everyone gets."""
        if self._lender is not None:
            entry, num_tokens = self._shares[self._lender]
            self._shares[self._lender] = (
                entry,
                num_tokens + self._whole_blocks(self._left_of(entry.request.step_tokens)),
            )
        return self._shares

    def _left_of(self, step_tokens: int) -> int:
        """For one that bounds the step."""
        if not step_tokens:
            return self._left
        bound = max(step_tokens, self._block_size)
        return max(0, min(self._left, bound - (self._size - self._left)))

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._block_size
