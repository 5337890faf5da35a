"""The peer tier: blocks in the host tiers of other nodes, read over `headwater.transfer`. Nothing is written to it.

Who has what is found by asking: one question with many ids to every peer at once, a short wait, and both answers are
remembered for a while, also that nobody has a block. Blocks are leased while they are read, so that their owner does
not reuse the memory; each is checked in the reader's own memory. A peer that dies, hangs or restarts is a miss, and
is left alone for a while.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from headwater.clock import Clock, RealClock
from headwater.errors import StoreClosed, TierUnavailable, TransferError
from headwater.kv.block import ROOT, Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.identity import split_block_ids
from headwater.kv.journal import Journal
from headwater.kv.shares import ShareUsage
from headwater.kv.stores.base import Absent, Kept, TierEvent, TierUsage
from headwater.kv.stores.breaker import Breaker
from headwater.kv.stores.finishing import finished
from headwater.kv.stores.peer_session import PeerSession
from headwater.kv.stores.peer_wire import MAX_IDS, Ask, Borrow, GiveBack, Have, Lent, LentBlock, Place, Returned
from headwater.kv.stores.searches import Searches
from headwater.transfer.agent import Agent
from headwater.transfer.memory import address_of
from headwater.transfer.regions import Region
from headwater.types import Tier


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Every wait has one of these bounds."""

    peers: tuple[tuple[str, int], ...]
    """Host and port of each."""
    ask_timeout_s: float = 0.1
    borrow_timeout_s: float = 1.0
    connect_timeout_s: float = 1.0
    read_timeout_s: float = 10.0
    present_for_s: float = 30.0
    """How long an answer that a peer has a block is believed; a block that is gone by then is a miss."""
    absent_for_s: float = 2.0
    max_known_blocks: int = 200_000
    movers: int = 4


class _Sighting(NamedTuple):
    session: PeerSession
    until: float
    family: Family
    parent: bytes


class PeerTier:
    """See the module docstring. Made on the event loop that drives it; the agent stays its owner's to close."""

    def __init__(
        self,
        options: PeerOptions,
        agent: Agent,
        key: bytes,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.tier: Tier = "peer"
        self.options = options
        self._agent = agent
        self._clock = clock or RealClock()
        self._landing: Region | None = None
        self._landing_address = 0
        chance = random.Random().random
        self.sessions = [
            PeerSession(host, port, agent, key, Breaker(self._clock, chance, threshold=2), options.connect_timeout_s)
            for host, port in options.peers
        ]
        self._seen: OrderedDict[bytes, _Sighting] = OrderedDict()
        """In order of their ends."""
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        self._journal = Journal("peer")
        self._searches = Searches()
        self._usage = TierUsage(0, 0, 0)
        self._movers = ThreadPoolExecutor(options.movers, thread_name_prefix="kv-peer")
        self._closed = False

    def land_in(self, memory: Region) -> None:
        """Memory that the agent knows: blocks whose buffers lie there are read without a copy between."""
        self._landing = memory
        self._landing_address = address_of(memory.view)

    # Who has what

    def known(self, ids: bytes) -> bytes:
        now = self._clock.now()
        return bytes(
            (seen := self._seen.get(block_id)) is not None and seen.until > now for block_id in split_block_ids(ids)
        )

    async def contains(self, family: Family, ids: bytes, first: int = 0) -> bytes:
        self._check_open()
        now = self._clock.now()
        split = split_block_ids(ids)[:MAX_IDS]
        known = self.known(ids)
        unsure = [
            number
            for number, here in enumerate(known[:MAX_IDS])
            if not here and self._absent.get(split[number], now) <= now
        ]
        if unsure:
            await self._searches.run(self._ask_all(family, split, unsure))
            known = self.known(ids)
        return known

    async def _ask_all(self, family: Family, split: Sequence[bytes], unsure: list[int]) -> None:
        ids = b"".join(split[number] for number in unsure)
        timeout_s = self.options.ask_timeout_s
        asked = [session for session in self.sessions if session.breaker.closed or not session.breaker.retry_after_s()]
        questions = (session.ask(Ask(session.next_serial(), ids), Have, timeout_s) for session in asked)
        answers = await asyncio.gather(*questions, return_exceptions=True)
        now = self._clock.now()
        for session, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Have):
                for number, here in zip(unsure, answer.flags, strict=False):
                    if here:
                        parent = split[number - 1] if number else ROOT
                        self._saw(split[number], _Sighting(session, now + self.options.present_for_s, family, parent))
            elif not isinstance(answer, TierUnavailable):
                raise answer
        for number in unsure:
            if split[number] not in self._seen:
                self._absent[split[number]] = now + self.options.absent_for_s
        while len(self._absent) > self.options.max_known_blocks:
            self._absent.popitem(last=False)

    def _saw(self, block_id: bytes, sighting: _Sighting) -> None:
        self._absent.pop(block_id, None)
        if block_id not in self._seen and not sighting.family.beside:
            self._journal.stored(block_id, sighting.parent)
        self._seen[block_id] = sighting
        self._seen.move_to_end(block_id)
        if len(self._seen) > self.options.max_known_blocks:
            self._forget(next(iter(self._seen)))

    def _forget(self, block_id: bytes) -> bool:
        seen = self._seen.pop(block_id, None)
        if seen is None:
            return False
        if not seen.family.beside:
            self._journal.removed(block_id)
        return True

    # Reading

    async def get(self, family: Family, ids: bytes, into: Sequence[memoryview]) -> list[Block | Absent]:
        self._check_open()
        split = split_block_ids(ids)
        answers: list[Block | Absent] = [Absent.MISSING] * len(split)
        by_session: dict[PeerSession, list[int]] = {}
        for number, block_id in enumerate(split):
            seen = self._seen.get(block_id)
            if seen is not None and seen.family == family:
                by_session.setdefault(seen.session, []).append(number)
        errors: list[TierUnavailable] = []
        for session, numbers in by_session.items():
            try:
                found = await self._get_from(session, family, [split[n] for n in numbers], [into[n] for n in numbers])
            except TierUnavailable as error:
                errors.append(error)
                found = [Absent.FAILED] * len(numbers)
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
                if not isinstance(answer, Block):
                    self._forget(split[number])
        self._count(answers)
        if errors and len(errors) == len(self.sessions):
            raise errors[0]
        return answers

    async def _get_from(
        self, session: PeerSession, family: Family, ids: list[bytes], into: list[memoryview]
    ) -> list[Block | Absent]:
        wish = Borrow(session.next_serial(), family, b"".join(ids))
        lent = await session.ask(wish, Lent, self.options.borrow_timeout_s)
        answers: list[Block | Absent] = [Absent.MISSING] * len(ids)
        if not lent.places:
            return answers
        suspect: list[int] = []
        try:
            numbers = await self._read(session, lent.places, into)
            for number in numbers:
                answers[number] = _checked(ids[number], lent.blocks[number], into[number])
            suspect = [number for number in numbers if answers[number] is Absent.DAMAGED]
        finally:
            valid = await self._give_back(session, lent.ticket, suspect)
        if not valid:
            return [Absent.MISSING if answer is Absent.DAMAGED else answer for answer in answers]
        return answers

    async def _read(self, session: PeerSession, places: list[Place], into: list[memoryview]) -> list[int]:
        """The numbers of what was read."""
        loop = asyncio.get_running_loop()
        numbers: list[int] = []
        for place in places:
            if len(place.numbers) != place.blocks.count or not all(0 <= n < len(into) for n in place.numbers):
                raise session.failed(ValueError("it lends what was not asked for"))
            views = [into[number] for number in place.numbers]
            if all(len(view) == place.blocks.block_bytes for view in views):
                try:
                    await finished(loop.run_in_executor(self._movers, self._move, place, views))
                except TransferError as error:
                    raise session.failed(error) from None
                numbers += place.numbers
        return numbers

    async def _give_back(self, session: PeerSession, ticket: int, suspect: list[int]) -> bool:
        try:
            back = GiveBack(session.next_serial(), ticket, suspect)
            return (await session.ask(back, Returned, self.options.borrow_timeout_s)).valid
        except TierUnavailable:
            return False  # its lease ends with the connection; what was checked is good all the same

    def _move(self, place: Place, views: list[memoryview]) -> None:
        """In a thread of its own."""
        timeout_s = self.options.read_timeout_s
        size = place.blocks.block_bytes
        groups = self._landing_groups(views, size)
        if groups is not None and self._landing is not None:
            for base, stride, members in groups:
                local = self._landing.blocks(
                    [index for _, index in members], block_bytes=size, stride=stride, base=base
                )
                remote = place.blocks.select([position for position, _ in members])
                self._agent.read(local, remote, timeout_s=timeout_s).run()
            return
        buffer = bytearray(size * len(views))
        region = self._agent.register(buffer, block_bytes=size)
        try:
            self._agent.read(region.blocks(range(len(views))), place.blocks, timeout_s=timeout_s).run()
            for number, view in enumerate(views):
                view[:] = memoryview(buffer)[number * size : (number + 1) * size]
        finally:
            self._agent.unregister(region)

    def _landing_groups(
        self, views: list[memoryview], size: int
    ) -> list[tuple[int, int, list[tuple[int, int]]]] | None:
        """(base, stride, [(position, index)]) if all views lie in the landing memory."""
        if self._landing is None:
            return None
        groups: dict[int, list[tuple[int, int]]] = {}
        most = self._landing.card.num_bytes - size
        for position, view in enumerate(views):
            index, base = divmod(address_of(view) - self._landing_address, size)
            if not 0 <= index * size + base <= most:
                return None
            groups.setdefault(base, []).append((position, index))
        return [(base, size, members) for base, members in groups.items()]

    # The rest of the contract

    async def put(self, family: Family, blocks: Sequence[Block], payloads: Sequence[memoryview]) -> list[Kept]:
        """What others keep is theirs."""
        self._check_open()
        return [Kept.REFUSED] * len(blocks)

    async def remove(self, ids: bytes) -> int:
        """Forgets who has them; the owners keep them."""
        self._check_open()
        return sum(map(self._forget, split_block_ids(ids)))

    async def clear(self, *, tenant: str | None = None, model: str | None = None) -> int:
        self._check_open()
        meant = [block_id for block_id, seen in self._seen.items() if seen.family.matches(tenant, model)]
        return sum(map(self._forget, meant))

    def usage(self) -> TierUsage:
        return replace(self._usage, num_blocks=len(self._seen))

    def limit(self, tenant: str, fraction: float) -> None:
        """Nothing is written to peers."""

    def shares(self) -> list[ShareUsage]:
        return []

    def drain_events(self) -> list[TierEvent]:
        now = self._clock.now()
        while self._seen and (oldest := next(iter(self._seen.items())))[1].until <= now:
            self._forget(oldest[0])
        return self._journal.drain(self.resident)

    def resident(self) -> Iterator[tuple[bytes, bytes]]:
        return iter([(block_id, seen.parent) for block_id, seen in self._seen.items() if not seen.family.beside])

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._searches.close()
        await asyncio.gather(*(session.close() for session in self.sessions))
        await asyncio.to_thread(self._movers.shutdown)

    def _count(self, answers: list[Block | Absent]) -> None:
        usage = self._usage
        self._usage = replace(
            usage,
            num_hits=usage.num_hits + sum(isinstance(answer, Block) for answer in answers),
            num_misses=usage.num_misses + answers.count(Absent.MISSING),
            num_damaged=usage.num_damaged + answers.count(Absent.DAMAGED),
            num_failed=usage.num_failed + answers.count(Absent.FAILED),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the peer tier is closed")


def _checked(block_id: bytes, lent: LentBlock | None, view: memoryview) -> Block | Absent:
    if lent is None:
        return Absent.MISSING
    if checksum(block_id, view) != lent.checksum:
        return Absent.DAMAGED
    return Block(block_id, lent.parent, lent.position, lent.checksum)
