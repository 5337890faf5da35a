"""The way of blocks out of the bucket, and the search for what is there.

A run is read with one request, header and payloads together; every block is checked in the caller's buffer. What turns
out damaged is read once more, in case the way was to blame; then the object is given up.

The search asks for single objects by name. Within a chain a run is there only if those before it are, as a rule, so the
end is found with a few rounds of questions side by side, however long the chain is.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from headwater.clock import Clock
from headwater.errors import TierUnavailable
from headwater.kv.block import Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.identity import split_block_ids
from headwater.kv.stores.base import Absent
from headwater.kv.stores.copying import copy
from headwater.kv.stores.finishing import finished
from headwater.kv.stores.object.bucket import Bucket, OutOfRange
from headwater.kv.stores.object.catalogue import Catalogue
from headwater.kv.stores.object.known import KnownRun
from headwater.kv.stores.object.runs import DamagedRun, RunShape, decode_header, runs_within

_log = logging.getLogger(__name__)

_JOIN_WITHIN = 256 << 10
"""Reading so much in vain is cheaper than another request."""
_QUESTIONS = 8
_THREADS = 2
_THREAD_FROM_BYTES = 128 << 10
"""Blocks of that size are copied and checked on threads: the event loop goes on, and so does the next object."""
_MAX_ABSENT = 100_000

Answers = list[Block | Absent]


class Piece(NamedTuple):
    """A wanted block: where in the batch, and where in which object."""

    number: int
    block_id: bytes
    run: KnownRun
    offset: int
    """In blocks, from the start of the object."""


class Reader:
    """See the module docstring."""

    def __init__(self, catalogue: Catalogue, bucket: Bucket, clock: Clock) -> None:
        self._catalogue = catalogue
        self._bucket = bucket
        self._clock = clock
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        """Names of objects that were not there, and until when that is believed."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-object")

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)

    # Search

    async def search(self, family: Family, ids: bytes, first: int) -> None:
        """Find out which objects of that chain there are."""
        shape = self._catalogue.shape(family)
        split = split_block_ids(ids)
        runs = runs_within(shape, ids, first)
        there, there_until = self._known_among(runs)
        try:
            async with asyncio.timeout(self._catalogue.options.lookup_timeout_s):
                there = await self._end(shape, runs, there, there_until)
        except TimeoutError:
            self._bucket.breaker.fail("looking up took too long")
        for name, start in runs[:there]:
            begin = max(start, first)
            known = ((at % shape.num_blocks, split[at - first]) for at in range(begin, start + shape.num_blocks))
            self._catalogue.learn(shape, name, known, split[begin - first - 1] if begin > first else None)

    def appeared(self, name: bytes) -> None:
        self._absent.pop(name, None)

    def _known_among(self, runs: list[tuple[bytes, int]]) -> tuple[int, int]:
        """Runs before the first number are there, from the second on they are not, as far as is known."""
        now = self._clock.now()
        there, until = 0, len(runs)
        for number, (name, _) in enumerate(runs):
            if self._catalogue.blocks.run(name) is not None:
                there = number + 1
            elif name in self._catalogue.doomed or self._absent.get(name, now) > now:
                until = number
                break
        return there, until

    async def _end(self, shape: RunShape, runs: list[tuple[bytes, int]], there: int, until: int) -> int:
        while there < until:
            count = min(_QUESTIONS, until - there)
            picks = [there + (until - there) * (number + 1) // count - 1 for number in range(count)]
            found = await asyncio.gather(*(self._bucket.exists(shape.key(runs[pick][0])) for pick in picks))
            for pick, exists in zip(picks, found, strict=True):
                if exists:
                    there = pick + 1
                else:
                    self._note_absent(runs[pick][0])
                    until = pick
                    break
        return there

    def _note_absent(self, name: bytes) -> None:
        self._absent[name] = self._clock.now() + self._catalogue.options.absent_for_s
        self._absent.move_to_end(name)
        if len(self._absent) > _MAX_ABSENT:
            self._absent.popitem(last=False)

    # Reading

    async def get(self, family: Family, ids: bytes, into: Sequence[memoryview]) -> Answers:
        split = split_block_ids(ids)
        answers: Answers = [Absent.MISSING] * len(split)
        wanted: dict[bytes, list[Piece]] = {}
        shape = self._catalogue.shape(family)
        for number, block_id in enumerate(split):
            gathered = self._catalogue.gathering.get(block_id)
            found = self._catalogue.blocks.find(block_id)
            if gathered is not None and gathered.shape == shape:
                answers[number] = self._from_memory(gathered.block, gathered.payload, into[number])
            elif found is not None and found[0].shape == shape:
                wanted.setdefault(found[0].name, []).append(Piece(number, block_id, *found))
        await self._get_runs([sorted(pieces, key=_offset) for pieces in wanted.values()], into, answers)
        self._count(answers)
        return answers

    async def read_run(self, run: KnownRun, wanted: list[tuple[int, bytes]], into: Sequence[memoryview]) -> Answers:
        """Some blocks (index, id) of an object, ascending."""
        answers = await self._read_once(run, wanted, into)
        if answers is not None and Absent.DAMAGED in answers:
            _log.warning(
                "object %s at %s: damaged or cut short; reading it once more", self._key(run), self._bucket.url
            )
            answers = await self._read_once(run, wanted, into)
        if answers is None:
            self._catalogue.gone(run.name)
            self._note_absent(run.name)
            return [Absent.MISSING] * len(wanted)
        if Absent.DAMAGED in answers:
            await self._give_up(run)
        else:
            self._catalogue.used(run)
        return answers

    async def _get_runs(self, wanted: list[list[Piece]], into: Sequence[memoryview], answers: Answers) -> None:
        """`wanted`: of each object, in its order."""
        trouble: list[TierUnavailable] = []
        results = await asyncio.gather(*(self._get_pieces(pieces, into) for pieces in wanted), return_exceptions=True)
        for pieces, result in zip(wanted, results, strict=True):
            if isinstance(result, TierUnavailable):
                trouble.append(result)
            elif isinstance(result, BaseException):
                raise result
            for number, piece in enumerate(pieces):
                answers[piece.number] = Absent.FAILED if isinstance(result, TierUnavailable) else result[number]
        for pieces in reversed(wanted):  # what is at the end of a chain is evicted first
            self._catalogue.used(pieces[0].run)
        if trouble and not any(isinstance(answer, Block) for answer in answers):
            raise trouble[0]

    async def _get_pieces(self, pieces: list[Piece], into: Sequence[memoryview]) -> Answers:
        wanted = [(piece.offset, piece.block_id) for piece in pieces]
        return await self.read_run(pieces[0].run, wanted, [into[piece.number] for piece in pieces])

    async def _read_once(
        self, run: KnownRun, wanted: list[tuple[int, bytes]], into: Sequence[memoryview]
    ) -> Answers | None:
        """None if the object is not there."""
        shape, size = run.shape, run.shape.payload_bytes
        indices = [index for index, _ in wanted]
        ranges = [(0, shape.header_bytes)]
        ranges += [(shape.payload_offset(first), shape.payload_offset(last + 1)) for first, last in _stretches(indices)]
        try:
            parts = await self._bucket.read_ranges(self._key(run), ranges, _JOIN_WITHIN)
            if parts is None:
                return None
            blocks = decode_header(shape, run.name, parts[0])
        except (DamagedRun, OutOfRange):
            return [Absent.DAMAGED] * len(wanted)
        payloads = [part[at : at + size] for part in parts[1:] for at in range(0, max(len(part), 1), size)]
        if len(payloads) != len(wanted):
            return [Absent.DAMAGED] * len(wanted)

        def check() -> Answers:
            return [
                _checked(blocks[index], block_id, payload, view)
                for (index, block_id), payload, view in zip(wanted, payloads, into, strict=True)
            ]

        if size < _THREAD_FROM_BYTES:
            return check()
        return await finished(asyncio.get_running_loop().run_in_executor(self._threads, check))

    def _from_memory(self, block: Block, payload: memoryview, view: memoryview) -> Block | Absent:
        answer = _checked(block, block.id, payload, view)
        if answer is Absent.DAMAGED:
            self._catalogue.drop_gathered([block.id])
        return answer

    async def _give_up(self, run: KnownRun) -> None:
        _log.error(
            "object %s at %s is damaged: it is deleted and its blocks are computed anew",
            self._key(run),
            self._bucket.url,
        )
        self._catalogue.doom(run)
        try:
            await self._bucket.delete([self._key(run)])
        except TierUnavailable:
            return  # upkeep tries again
        self._catalogue.gone(run.name)

    def _key(self, run: KnownRun) -> str:
        return run.shape.key(run.name)

    def _count(self, answers: Answers) -> None:
        count = self._catalogue.count
        count.hits += sum(isinstance(answer, Block) for answer in answers)
        count.misses += answers.count(Absent.MISSING)
        count.damaged += answers.count(Absent.DAMAGED)
        count.failed += answers.count(Absent.FAILED)


def _checked(block: Block, wanted: bytes, payload: memoryview, view: memoryview) -> Block | Absent:
    if block.id != wanted or len(payload) != len(view):
        return Absent.DAMAGED
    copy(view, payload)
    return block if checksum(block.id, view) == block.checksum else Absent.DAMAGED


def _offset(piece: Piece) -> int:
    return piece.offset


def _stretches(indices: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as stretches without a gap: (first, last)."""
    stretches: list[tuple[int, int]] = []
    for index in indices:
        if stretches and index == stretches[-1][1] + 1:
            stretches[-1] = stretches[-1][0], index
        else:
            stretches.append((index, index))
    return stretches
