"""One worker of the fast simulation: what it has to do, what its steps take, who prefills in the next one."""

from collections import deque
from dataclasses import dataclass
from math import inf

from headwater.planner.pool import WorkerModel
from headwater.router.price import Occupancy, prefill_pairs

_MAX_PIECES = 64


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    at_ms: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Of the prompt, found wherever it is prefilled."""


class Item:
    """A request under way."""

    __slots__ = ("cached", "decoder", "left", "number", "output", "pairs", "prefiller", "prompt", "room", "started")
    prefiller: "Worker"
    decoder: "Worker"

    def __init__(self, number: int, job: Job) -> None:
        self.number = number
        self.prompt = job.prompt_tokens
        self.cached = min(job.cached_tokens, job.prompt_tokens - 1)
        self.output = job.output_tokens
        self.left = self.prompt - self.cached
        self.pairs = prefill_pairs(self.left, self.cached)
        self.room = self.prompt + self.output
        self.started = 0.0


class Worker:
    """State of one simulated worker."""

    def __init__(self, number: int, model: WorkerModel) -> None:
        curve, tables = model.curve, model.tables
        self.number = number
        self.model = model
        self.shared = tables.shared
        self.prefill_ms = curve.prefill_ms
        self.prefill_token_ms, self.prefill_pair_ms = curve.prefill_token_ms, curve.prefill_pair_ms
        self.decode_ms = curve.decode_ms
        self.decode_sequence_ms, self.decode_context_ms = curve.decode_sequence_ms, curve.decode_context_token_ms
        self.costs = tables.costs
        self.chunk, self.most = model.chunk_tokens, model.max_num_seqs
        self.free = model.kv_tokens
        self.waiting: deque[Item] = deque()
        """For a place here, to prefill."""
        self.active: list[Item] = []
        """Being prefilled."""
        self.pending: deque[Item] = deque()
        """For room to decode here, before they are sent to a prefill worker, ..."""
        self.pending_room = 0
        """... of so many tokens together."""
        self.joining: list[Item] = []
        self.decoding: list[tuple[int, int, Item]] = []
        self.steps = 0
        self.num_decoding = 0
        self.context = 0
        self.expected = 0
        """Sequences that will decode here and are prefilled elsewhere."""
        self.for_others = 0
        """Sequences that are prefilled here to decode elsewhere."""
        self.backlog_tokens = 0
        self.backlog_pairs = 0.0
        self.num_prefilling = 0
        self.kv_tokens = 0
        """Of prompts computed here, of the sequences that have not ended."""
        self.ends = inf
        self.began = 0.0
        self.leap = 0
        self.pieces: list[tuple[Item, int]] = []
        self.link_free = 0.0
        self.busy_prefill_ms = 0.0
        self.busy_decode_ms = 0.0

    def step_ms(self, sequences: int, context: int) -> float:
        """One decode step of all that is or will be here."""
        shared = self.shared[min(sequences, len(self.shared) - 1)]
        return shared + self.decode_ms + self.decode_sequence_ms * sequences + self.decode_context_ms * context

    def occupancy(self) -> Occupancy:
        """What a router knows of it."""
        costs, decoding, prefilling = self.costs, self.num_decoding + self.expected, self.num_prefilling
        return Occupancy(
            costs,
            self.backlog_tokens,
            self.backlog_pairs,
            prefilling,
            decoding,
            self.context,
            self.kv_tokens,
            1.0,
            costs.prefill_ms(self.backlog_tokens, self.backlog_pairs),
            self.step_ms(decoding + prefilling, self.context),
            costs.prefills_ms(decoding + prefilling, self.kv_tokens),
        )

    def choose(self, now: float) -> list[tuple[Item, int]]:
        """Who prefills how many tokens in the next step."""
        left = self.chunk - self.num_decoding
        pieces: list[tuple[Item, int]] = []
        lender = -1
        most: float = inf
        for item in self.active:
            left, lender, most = _share(pieces, item, left, lender, most)
            if left <= 0:
                break
        waiting = self.waiting
        while left > 0 and waiting and len(pieces) < _MAX_PIECES:
            item = waiting[0]
            if item.left > left and item.left > most:
                break
            if not self._admit(item):
                break
            waiting.popleft()
            item.started = now
            self.active.append(item)
            left, lender, most = _share(pieces, item, left, lender, most)
        if lender >= 0 and left > 0:
            item, count = pieces[lender]
            pieces[lender] = (item, min(item.left, count + left))
        return pieces

    def _admit(self, item: Item) -> bool:
        if self.num_decoding + len(self.active) >= self.most:
            return False
        room = item.room if item.decoder is self else item.prompt
        if self.free < room:
            return False
        self.free -= room
        return True


def _share(pieces: list[tuple[Item, int]], item: Item, left: int, lender: int, most: float) -> tuple[int, int, float]:
    """Give an item its tokens of a step; (left, lender, most) as `headwater.scheduler.budget` has them."""
    if item.left <= left:
        pieces.append((item, item.left))
        return left - item.left, lender, most
    if item.left > most:
        return left, lender, most
    half = left - left // 2
    pieces.append((item, half))
    return left - half, len(pieces) - 1, item.left / 2
