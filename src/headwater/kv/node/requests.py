"""What each request of a client means to the store. What needs no waiting is answered at once, in order; the rest in
tasks of the connection."""

import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from itertools import islice

from headwater.clock import Clock
from headwater.errors import ConfigError, InternalError, StoreError
from headwater.kv.block import ROOT, Family
from headwater.kv.node import upkeep, wire
from headwater.kv.node.store import NodeStore, Piece
from headwater.kv.node.turns import Priority
from headwater.kv.pricing import ComputeRate
from headwater.kv.reservations import Refusal
from headwater.kv.resident import stored_runs
from headwater.kv.stores.base import TierEvent, TierStore
from headwater.kv.stores.disk import DiskTier
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.quantized import bare
from headwater.protocol.events import BlocksCleared, BlocksStored
from headwater.types import BLOCK_ID_BYTES

logger = logging.getLogger(__name__)

_REFUSALS = {Refusal.PRESENT: wire.PRESENT, Refusal.BUSY: wire.BUSY, Refusal.FULL: wire.FULL}
_MAX_TIMEOUT_S = 600.0
_SNAPSHOT_BLOCKS = 4096
_MAX_WARNED = 64
_MIB = 1 << 20


class Requests:
    """`clients` tells their names."""

    def __init__(self, store: NodeStore, clock: Clock, clients: Callable[[], list[str]]) -> None:
        self._store, self._clock, self._clients = store, clock, clients
        self._started = clock.now()
        self._writing: dict[tuple[int, int], Piece] = {}
        self._too_large: set[Family] = set()

    def drop(self, holder: int) -> None:
        """A client is gone."""
        self._store.host.ledger.drop_holder(holder)
        for key in [key for key in self._writing if key[0] == holder]:
            del self._writing[key]

    def used(self, request: wire.Used) -> None:
        """Blocks were read without a lease: that counts as much as with one."""
        piece = _piece(request.chain)
        self._store.host.used(piece.ids)
        self._store.used(piece)
        self._store.prices.observe("host", piece.num_blocks * piece.family.payload_bytes, request.copied_ms)

    def answer_now(self, holder: int, request: wire.Request) -> wire.Answer | None:
        """None if it takes waiting."""
        match request:
            case wire.Reserve():
                return self._reserve(holder, request)
            case wire.Commit():
                return self._commit(holder, request)
            case wire.Release():
                return self._release(holder, request)
            case wire.Lease(timeout_s=0):
                return self._lease(holder, request)
            case wire.Locate(timeout_s=0):
                return wire.Located(request.serial, self._store.locate(_piece(request.chain), request.num_parts))
            case wire.Describe():
                rate = ComputeRate(request.token_ms, request.pair_ms, request.block_tokens)
                self._store.prices.describe(request.family, rate)
                return wire.Counted(request.serial, 0)
            case wire.Limit():
                for tier in self._store.tiers:
                    tier.limit(request.tenant, request.fraction)
                return wire.Counted(request.serial, 0)
            case wire.Pin():
                return wire.Counted(request.serial, self._pin(request))
            case wire.AskStatus():
                return self._status(request.serial)
            case wire.ListBlocks():
                tier = self._ledgered(request.tier)
                return wire.BlockList(request.serial, *upkeep.list_blocks(tier.ledger, request.after, request.limit))
            case _:
                return None

    async def answer(self, holder: int, request: wire.Request) -> wire.Answer:
        match request:
            case wire.Lease():
                piece = _piece(request.chain)
                await self._store.fetch(piece, Priority.DEMANDED, min(request.timeout_s, _MAX_TIMEOUT_S))
                return self._lease(holder, request)
            case wire.Locate():
                piece = _piece(request.chain)
                await self._store.ask(piece, min(request.timeout_s, _MAX_TIMEOUT_S))
                return wire.Located(request.serial, self._store.locate(piece, request.num_parts))
            case wire.Prefetch():
                piece = _piece(request.chain)
                timeout_s = min(request.timeout_s, _MAX_TIMEOUT_S)
                return wire.Counted(request.serial, await self._store.fetch(piece, Priority.EXPECTED, timeout_s))
            case wire.Remove():
                removed = _checked(request.ids)
                return wire.Counted(request.serial, await self._everywhere(lambda tier: tier.remove(removed)))
            case wire.Clear():
                cleared = await self._everywhere(lambda tier: tier.clear(tenant=request.tenant, model=request.model))
                return wire.Counted(request.serial, cleared)
            case wire.Verify():
                return wire.Verified(request.serial, *await upkeep.verify(self._ledgered(request.tier)))
            case wire.Warm():
                return wire.Counted(request.serial, await upkeep.warm(self._store, request.max_bytes))
            case _:
                raise InternalError(f"nobody answers {type(request).__name__}")

    def residency(self) -> Iterator[list[TierEvent]]:
        """Everything that is resident at the first step, for one who begins to follow, in parts of bounded size."""
        snapshots = [(tier.tier, tier.resident()) for tier in self._store.tiers]
        for name, resident in snapshots:
            yield [BlocksCleared(name)]
            blocks = ((block_id, None if parent == ROOT else parent) for block_id, parent in resident)
            while part := list(islice(blocks, _SNAPSHOT_BLOCKS)):
                yield [BlocksStored(run.block_ids, run.parent, name) for run in stored_runs(part)]

    def _reserve(self, holder: int, request: wire.Reserve) -> wire.Answer:
        piece = _piece(request.chain)
        self._warn_of_size(piece.family)
        ticket, answers = self._store.host.reserve(holder, piece.family, piece.blocks())
        ledger = self._store.host.ledger
        offsets = [ledger.reserved_offset(ticket, slot) if isinstance(slot, int) else 0 for slot in answers]
        self._writing[holder, ticket] = piece
        return wire.Reserved(
            request.serial,
            ticket,
            ledger.families.find(piece.family),
            [slot if isinstance(slot, int) else _REFUSALS[slot] for slot in answers],
            offsets,
        )

    def _warn_of_size(self, family: Family) -> None:
        """Blocks that can never fit: say so once per family."""
        space = self._store.host.ledger.space
        if space.fits(family.payload_bytes) or family in self._too_large or len(self._too_large) >= _MAX_WARNED:
            return
        self._too_large.add(family)
        logger.warning(
            "blocks of %s have %d bytes; the host tier holds blocks of %d at most: give it more memory",
            family.model, family.payload_bytes, space.chunk_bytes,
        )  # fmt: skip

    def _commit(self, holder: int, request: wire.Commit) -> wire.Answer:
        committed = self._store.host.commit(holder, request.ticket, request.checksums)
        self._store.committed()
        piece = self._writing.pop((holder, request.ticket), None)
        if piece is not None:
            self._store.used(piece)
        return wire.Committed(request.serial, len(committed))

    def _lease(self, holder: int, request: wire.Lease) -> wire.Answer:
        """A leading run: what comes after a gap is of no use to anybody."""
        host = self._store.host
        piece = _piece(request.chain)
        piece = piece.part(0, host.ledger.table.num_leading(piece.ids))
        ticket, found = host.lease(holder, piece.family, piece.ids)
        run = []
        for hit in found:
            if hit is None:
                break
            run.append(hit)
        self._store.used(piece)
        return wire.Leased(
            request.serial,
            ticket,
            host.ledger.families.find(piece.family),
            [slot for slot, _ in run],
            [record.offset for _, record in run],
            [record.block.checksum for _, record in run],
        )

    def _release(self, holder: int, request: wire.Release) -> wire.Answer:
        valid = self._store.host.release(holder, request.ticket, request.damaged)
        if valid and request.copied_bytes:
            self._store.prices.observe("host", request.copied_bytes, request.copied_ms)
        return wire.Released(request.serial, valid)

    def _pin(self, request: wire.Pin) -> int:
        ledger = self._store.host.ledger
        if not request.seconds:
            return ledger.unpin(_checked(request.ids))
        return sum(ledger.pin(_checked(request.ids), self._clock.now() + request.seconds))

    def _ledgered_tiers(self) -> list[HostTier | DiskTier]:
        return [tier for tier in map(bare, self._store.tiers) if isinstance(tier, HostTier | DiskTier)]

    def _ledgered(self, name: str) -> HostTier | DiskTier:
        for tier in self._ledgered_tiers():
            if tier.tier == name:
                return tier
        raise ConfigError(f"this store has no {name} tier that can be listed or verified")

    async def _everywhere(self, act: Callable[[TierStore], Awaitable[int]]) -> int:
        """A tier that is out of reach does not keep the others from it; the first problem is reported at the end."""
        total = 0
        problems: list[StoreError] = []
        for tier in self._store.tiers:
            try:
                total += await act(tier)
            except StoreError as error:
                problems.append(error)
        if problems:
            raise problems[0]
        return total

    def _status(self, serial: int) -> wire.StatusReport:
        store, ledger = self._store, self._store.host.ledger
        problems = {one.tier.tier: one.problem for one in store.lower}
        return wire.StatusReport(
            serial,
            tiers=[self._tier_status(tier, problems.get(tier.tier, "")) for tier in store.tiers],
            clients=self._clients(),
            pinned_bytes=ledger.pinned_bytes,
            huge_bytes=store.host.pool.huge_bytes(),
            num_stranded=ledger.num_stranded,
            num_waiting=sum(one.turns.num_waiting for one in store.lower),
            num_spills_dropped=sum(one.num_dropped for one in store.lower),
            uptime_s=self._clock.now() - self._started,
        )

    def _tier_status(self, tier: TierStore, problem: str) -> wire.TierStatus:
        kept = bare(tier)
        families = list(kept.ledger.families.usage()) if isinstance(kept, HostTier | DiskTier) else []
        return wire.TierStatus(
            tier=tier.tier,
            problem=problem,
            families=[
                wire.FamilyUsage(f.model, f.layout, f.tenant, f.payload_bytes, n, used, f.parts, f.beside)
                for f, n, used in families
            ],
            tenants=tier.shares(),
            load_ms_per_mib=self._store.prices.load_ms(tier.tier, _MIB),
            **asdict(tier.usage()),
        )


def _piece(chain: wire.Chain) -> Piece:
    return Piece(chain.family, _checked(chain.ids), chain.first, chain.parent)


def _checked(ids: bytes) -> bytes:
    if len(ids) % BLOCK_ID_BYTES:
        raise ConfigError(f"{len(ids)} bytes are no block ids: {BLOCK_ID_BYTES} bytes each")
    return ids
