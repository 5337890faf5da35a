"""Synthetic workloads: conversations on top of shared system prompts, with real block identity.

Every piece of text (system prompt, document, question, answer) is a run of one token that is its own, so that a next
turn finds in the cache what an earlier one computed or generated, and nobody else does.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from headwater.kv.identity import chain_block_ids
from headwater.sim.workload import SimRequest
from headwater.types import BLOCK_ID_BYTES, TOKEN_ID_BYTES, BlockId

_FIRST_SYSTEM_TOKEN = 1 << 10
_FIRST_SESSION_TOKEN = 1 << 20
_TOKENS_PER_SESSION = 1 << 8
_GENERATION_S = 0.02
"""How long an answer token takes to read, or to generate; the next turn comes after that."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Sessions of several turns, each on top of one of a few shared system prompts.

    Lengths are drawn from a log-normal distribution around the means, sessions arrive as a Poisson process, turns
    follow after an exponential think time.
    """

    name: str
    num_sessions: int
    sessions_per_s: float
    num_system_prompts: int
    system_tokens: int
    turns: int
    question_tokens: int
    answer_tokens: int
    think_s: float
    document_tokens: int = 0
    """Private to a session, in its first turn."""
    skew: float = 2.0
    """How unequally popular system prompts are: the n-th is asked for in proportion to n^-skew."""

    def requests(self, block_size: int, seed: int = 0) -> list[SimRequest]:
        """All turns of all sessions, in order of arrival."""
        random = Random(f"{self.name}/{seed}")
        systems = self._systems(random)
        requests: list[SimRequest] = []
        start_s = 0.0
        for session in range(self.num_sessions):
            start_s += random.expovariate(self.sessions_per_s)
            requests += self._session(random, session, systems[session], start_s, block_size)
        return sorted(requests, key=lambda request: request.at_s)

    def _systems(self, random: Random) -> list[int]:
        """Of each session, the number of its system prompt."""
        numbers = range(max(1, self.num_system_prompts))
        weights = [(number + 1.0) ** -self.skew for number in numbers]
        return random.choices(numbers, weights, k=self.num_sessions)

    def _session(
        self, random: Random, session: int, system: int, start_s: float, block_size: int
    ) -> Iterator[SimRequest]:
        text = _Conversation(block_size)
        token = _FIRST_SESSION_TOKEN + session * _TOKENS_PER_SESSION
        if self.num_system_prompts:
            text.append(_FIRST_SYSTEM_TOKEN + system, self.system_tokens)
        if self.document_tokens:
            text.append(token, _length(random, self.document_tokens))
        at_s = start_s
        for turn in range(1, self.turns + 1):
            text.append(token + 2 * turn - 1, _length(random, self.question_tokens))
            answer_tokens = _length(random, self.answer_tokens)
            prompt_tokens, prompt_ids = text.num_tokens, text.ids
            text.append(token + 2 * turn, answer_tokens - 1)
            answer_ids = text.ids[len(prompt_ids) :]
            # The last token of an answer is never computed, since nothing follows it.
            text.append(token + 2 * turn, 1)
            yield SimRequest(at_s, prompt_tokens, answer_tokens, prompt_ids, f"{self.name}-{session}", answer_ids)
            at_s += random.expovariate(1 / self.think_s) + _GENERATION_S * answer_tokens


class _Conversation:
    """A growing prompt and the ids of its full blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.ids = b""
        self.num_tokens = 0
        self._tail = b""

    def append(self, token: int, count: int) -> None:
        tokens = self._tail + array("I", [token] * count).tobytes()
        parent = BlockId(self.ids[-BLOCK_ID_BYTES:]) if self.ids else None
        self.ids += chain_block_ids(b"", tokens, self._block_size, parent=parent)
        full_bytes = len(tokens) // (self._block_size * TOKEN_ID_BYTES) * self._block_size * TOKEN_ID_BYTES
        self._tail = tokens[full_bytes:]
        self.num_tokens += count


MIXES: dict[str, Mix] = {
    mix.name: mix
    for mix in (
        Mix("rag", 2000, 2.0, 8, 3000, 3, 150, 150, 8.0, document_tokens=1500),
        Mix("chat", 1500, 2.0, 4, 600, 6, 80, 200, 12.0),
        Mix("agents", 600, 0.8, 3, 6000, 12, 500, 120, 3.0),
        Mix("documents", 800, 1.0, 1, 200, 2, 60, 250, 20.0, document_tokens=16_000),
        Mix("unique", 3000, 6.0, 0, 0, 1, 1000, 200, 1.0),
    )
}
"""By name, for `headwater simulate --mix`."""


def _length(random: Random, mean: int) -> int:
    """Log-normal: half of the lengths within a factor of 1.5 of the median, and the mean as asked for."""
    return max(1, int(random.lognormvariate(0.0, 0.6) * mean * 0.835))
