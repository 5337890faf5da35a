"""Simulated requests: lengths, arrival and block identity, no text."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from struct import pack

from headwater.bench.traces import MOONCAKE_BLOCK_TOKENS, TraceRow
from headwater.types import BLOCK_ID_BYTES


@dataclass(frozen=True, slots=True)
class SimRequest:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: bytes
    """Of the full blocks of the prompt."""
    session_id: str | None = None


def from_trace(rows: Iterable[TraceRow], block_size: int) -> Iterator[SimRequest]:
    """Rows with hash ids share the blocks those name; rows without share nothing. Lengths of 0 become 1."""
    for number, row in enumerate(rows):
        prompt_tokens = max(1, row.input_tokens)
        yield SimRequest(
            row.at_s, prompt_tokens, max(1, row.output_tokens), _block_ids(number, row, prompt_tokens, block_size)
        )


def _block_ids(number: int, row: TraceRow, prompt_tokens: int, block_size: int) -> bytes:
    num_blocks = prompt_tokens // block_size
    if not row.hash_ids:
        return b"".join([pack("<QQ", number << 24 | block, 1) for block in range(num_blocks)])
    # The id of a block is where its end falls: the trace's ids are chained, so the last one names the whole prefix.
    ids = []
    for block in range(num_blocks):
        end = (block + 1) * block_size
        chunk, offset = divmod(end - 1, MOONCAKE_BLOCK_TOKENS)
        ids.append(pack("<QQ", row.hash_ids[min(chunk, len(row.hash_ids) - 1)] << 12 | offset, 0))
    return b"".join(ids)


@dataclass(frozen=True, slots=True)
class Mix:
    """A synthetic workload: sessions of several turns, each on top of one of a few shared system prompts.

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

    def requests(self, block_size: int, seed: int = 0) -> list[SimRequest]:
        """All turns of all sessions, in order of arrival."""
        random = Random(f"{self.name}/{seed}")
        requests: list[SimRequest] = []
        start_s = 0.0
        for session in range(self.num_sessions):
            start_s += random.expovariate(self.sessions_per_s)
            requests += self._session(random, session, start_s, block_size)
        return sorted(requests, key=lambda request: request.at_s)

    def _session(self, random: Random, session: int, start_s: float, block_size: int) -> Iterator[SimRequest]:
        system = min(int(random.paretovariate(1.0)) - 1, self.num_system_prompts - 1)
        context = self.system_tokens + (_length(random, self.document_tokens) if self.document_tokens else 0)
        at_s = start_s
        for _ in range(self.turns):
            context += _length(random, self.question_tokens)
            answer = _length(random, self.answer_tokens)
            yield SimRequest(
                at_s, context, answer, self._ids(system, session, context, block_size), f"{self.name}-{session}"
            )
            context += answer
            at_s += random.expovariate(1 / self.think_s) + 0.02 * answer

    def _ids(self, system: int, session: int, context: int, block_size: int) -> bytes:
        shared = self.system_tokens // block_size
        return b"".join(
            [
                pack("<QQ", system if block < shared else 1 << 40 | session, 2 << 32 | block)
                for block in range(context // block_size)
            ]
        )


MIXES: dict[str, Mix] = {
    mix.name: mix
    for mix in (
        Mix("rag", 2000, 2.0, 8, 3000, 3, 150, 150, 8.0, document_tokens=1500),
        Mix("chat", 1500, 2.0, 4, 600, 6, 80, 200, 12.0),
        Mix("agents", 600, 0.8, 3, 6000, 12, 500, 120, 3.0),
        Mix("documents", 800, 1.0, 1, 200, 2, 60, 250, 20.0, document_tokens=16_000),
        Mix("unique", 3000, 6.0, 1, 0, 1, 1000, 200, 1.0),
    )
}
"""By name, for `headwater simulate --mix`."""


def _length(random: Random, mean: int) -> int:
    return max(1, int(random.lognormvariate(0.0, 0.6) * mean * 0.835))


assert len(pack("<QQ", 0, 0)) == BLOCK_ID_BYTES
