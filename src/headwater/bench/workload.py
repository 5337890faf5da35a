"""What a load consists of: requests with a prompt, an output length and, for replay, a time.

Prompts are made of plain words, so that any tokenizer takes about one token per word; `scale` corrects the rest
(measured from the server's own `usage` during warm-up). The same seed gives the same prompts everywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body "
    "information back parent face others level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send."""

    prompt: str
    output_tokens: int
    at_s: float | None = None
    """Seconds after the start, for trace replay; None: whenever the arrival process says."""


class Workload(Protocol):
    def requests(self, scale: float) -> Iterator[LoadRequest]:
        """All requests. `scale`: words per token."""
        ...


def words(random: Random, count: int) -> str:
    """`count` words joined by blanks."""
    return " ".join(random.choices(WORDS, k=count))


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """Prompts of equal length that share one of `num_prefixes` heads and end in words of their own."""

    num_requests: int
    input_tokens: int
    output_tokens: int
    prefix_tokens: int = 0
    num_prefixes: int = 1
    seed: int = 0

    def requests(self, scale: float) -> Iterator[LoadRequest]:
        heads = [
            words(Random(f"{self.seed}/head/{i}"), round(self.prefix_tokens * scale)) for i in range(self.num_prefixes)
        ]
        tail_words = max(1, round((self.input_tokens - self.prefix_tokens) * scale))
        random = Random(f"{self.seed}/tails")
        for number in range(self.num_requests):
            head = heads[number % self.num_prefixes]
            tail = words(random, tail_words)
            yield LoadRequest(prompt=f"{head} {tail}" if head else tail, output_tokens=self.output_tokens)
