"""What every back-end must do. Subclass, say which back-end, and let pytest collect the class.

Two agents of one process stand for two hosts; what needs processes that die is tested elsewhere.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from headwater.errors import (
    DataCorrupted,
    PeerLost,
    RegionGone,
    StaleGeneration,
    TransferCancelled,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from headwater.transfer.agent import Agent
from headwater.transfer.base import Backend, Grant, Link, PeerSession, RemoteRegion
from headwater.transfer.blocks import MAX_CHUNK_BYTES, Blocks, Chunk
from headwater.transfer.card import Access, RegionKind
from headwater.transfer.choice import make_backends
from headwater.transfer.options import AgentOptions
from headwater.transfer.outcome import Stop
from headwater.transfer.regions import Region
from headwater.transfer.transfer import Transfer

BLOCK = 512
KEY = b"conformance-key-of-32-bytes-----"
WAIT_S = 20.0


@contextmanager
def fails_with(kind: type[TransferError], says: str = "") -> Iterator[None]:
    caught: TransferError | None = None
    try:
        yield
    except kind as error:
        caught = error
    assert caught is not None, f"no {kind.__name__}"
    assert says in caught.message, caught.message


def run_until_its_end_is_noticed(transfer: Transfer) -> None:
    """Run until something else than `PeerLost` is raised: for a moment the peer's former life is taken for the present
    one, and memory that is mapped can even be read."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with suppress(PeerLost):
            transfer.run()
        time.sleep(0.01)


class Gate:
    """Holds every move of a back-end up while it is shut."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.spoil: Callable[[], None] = lambda: None

    def pass_through(self, stop: Stop) -> None:
        self.reached.set()
        while not self.open.wait(0.01):
            stop.check()


class GatedBackend:
    """The back-end under test behind a gate."""

    def __init__(self, inner: Backend, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate
        self.name = inner.name

    def unavailable(self) -> str:
        return self._inner.unavailable()

    def serves(self, local: RegionKind, remote: RegionKind) -> bool:
        return self._inner.serves(local, remote)

    def connect(self, session: PeerSession, stop: Stop) -> "GatedLink":
        return GatedLink(self._inner.connect(session, stop), self._gate)

    def grant(self, region: Region, offer: bytes) -> Grant:
        return self._inner.grant(region, offer)

    def forget(self, region: Region) -> None:
        self._inner.forget(region)

    def close(self) -> None:
        self._inner.close()


class GatedLink:
    def __init__(self, inner: Link, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate
        self.lanes = inner.lanes

    def attach(self, remote: RemoteRegion) -> None:
        self._inner.attach(remote)

    def prepare(self, region: Region, remote: RemoteRegion, chunk: Chunk, *, write: bool) -> Any:
        return self._inner.prepare(region, remote, chunk, write=write)

    def move(self, step: Any, stop: Stop) -> None:
        self._gate.pass_through(stop)
        self._inner.move(step, stop)
        self._gate.spoil()

    def close(self) -> None:
        self._inner.close()


@dataclass
class Pair:
    """`here` begins all transfers, `there` owns what they touch."""

    here: Agent
    there: Agent
    local: Region
    remote: Region
    gate: Gate


class TransferConformance:
    """The suite."""

    backend: str

    def options(self) -> AgentOptions:
        return AgentOptions(key=KEY, backends=(self.backend,), heartbeat_s=0.2, peer_timeout_s=2.0)

    def backends(self) -> list[Backend]:
        return make_backends([self.backend])

    def remote_region(self, agent: Agent, num_bytes: int, access: Access = "both") -> Region:
        return agent.allocate(num_bytes, block_bytes=BLOCK, access=access)

    def contents(self, region: Region) -> bytes:
        return bytes(region.view)

    def fill(self, region: Region, data: bytes) -> None:
        region.view[:] = data

    @contextmanager
    def pair(self, num_blocks: int = 64, lookup: Callable[[str], bytes | None] | None = None) -> Iterator[Pair]:
        gate = Gate()
        gated = [GatedBackend(backend, gate) for backend in self.backends()]
        with Agent("here", self.options(), backends=gated, lookup=lookup) as here, self.agent("there") as there:
            local = here.allocate(num_blocks * BLOCK, block_bytes=BLOCK)
            remote = self.remote_region(there, num_blocks * BLOCK)
            here.add_peer(there.card())
            yield Pair(here, there, local, remote, gate)
            gate.open.set()

    def agent(self, name: str) -> Agent:
        return Agent(name, self.options(), backends=self.backends())

    # Bytes

    def test_every_byte_arrives_and_no_other_changes(self) -> None:
        for write in (False, True):
            for shuffled in (False, True):
                self._check_bytes(write=write, shuffled=shuffled)

    def _check_bytes(self, *, write: bool, shuffled: bool) -> None:
        with self.pair() as pair:
            rng = random.Random(f"{write}{shuffled}")
            mine, theirs = rng.randbytes(64 * BLOCK), rng.randbytes(64 * BLOCK)
            pair.local.view[:] = mine
            self.fill(pair.remote, theirs)
            here, there = list(range(5, 45)), list(range(11, 51))
            if shuffled:
                rng.shuffle(here)
                rng.shuffle(there)
            order = pair.here.write if write else pair.here.read
            moved = order(pair.local.blocks(here), pair.remote.blocks(there)).run()
            assert moved.num_bytes == 40 * BLOCK
            assert moved.backend == self.backend
            before, source = (theirs, mine) if write else (mine, theirs)
            to, at = (there, here) if write else (here, there)
            after = bytearray(before)
            for t, a in zip(to, at, strict=True):
                after[t * BLOCK : (t + 1) * BLOCK] = source[a * BLOCK : (a + 1) * BLOCK]
            assert (self.contents(pair.remote) if write else bytes(pair.local.view)) == after
            assert (bytes(pair.local.view) if write else self.contents(pair.remote)) == source

    def test_slices_of_blocks_with_unequal_layouts(self) -> None:
        for write in (False, True):
            self._check_slices(write=write)

    def _check_slices(self, *, write: bool) -> None:
        with self.pair() as pair:
            rng = random.Random(3)
            pair.local.view[:] = rng.randbytes(64 * BLOCK)
            self.fill(pair.remote, rng.randbytes(64 * BLOCK))
            here = pair.local.blocks([3, 1], block_bytes=100, stride=128, base=7)
            there = pair.remote.blocks([0, 9], block_bytes=100, stride=512, base=300)
            (pair.here.write if write else pair.here.read)(here, there).run()
            theirs, mine = self.contents(pair.remote), bytes(pair.local.view)
            assert theirs[300:400] == mine[7 + 3 * 128 : 107 + 3 * 128]
            assert theirs[300 + 9 * 512 : 400 + 9 * 512] == mine[7 + 128 : 107 + 128]

    def test_more_blocks_and_bytes_than_one_part_holds(self) -> None:
        for write in (False, True):
            self._check_many(write=write)

    def _check_many(self, *, write: bool) -> None:
        num_blocks = 2 * MAX_CHUNK_BYTES // BLOCK + 777
        with self.pair(num_blocks) as pair:
            data = random.Random(4).randbytes(num_blocks * BLOCK)
            if write:
                pair.local.view[:] = data
            else:
                self.fill(pair.remote, data)
            whole = pair.local.blocks(range(num_blocks)), pair.remote.blocks(range(num_blocks))
            odd = pair.local.blocks(range(1, 5000, 2)), pair.remote.blocks(range(1, 5000, 2))
            order = pair.here.write if write else pair.here.read
            for local, remote in (odd, whole):
                order(local, remote).run()
            assert (self.contents(pair.remote) if write else bytes(pair.local.view)) == data

    def test_a_transfer_is_posted_again_and_sees_new_bytes(self) -> None:
        with self.pair() as pair:
            transfer = pair.here.read(pair.local.blocks([1, 2]), pair.remote.blocks([8, 4]))
            assert transfer.check() == "idle"
            for value in (b"a", b"b", b"c"):
                self.fill(pair.remote, value * 64 * BLOCK)
                transfer.post().result(WAIT_S)
                assert transfer.check() == "done"
                assert bytes(pair.local.view[BLOCK : 3 * BLOCK]) == value * 2 * BLOCK

    def test_prepared_lists_are_selected_by_position(self) -> None:
        with self.pair() as pair:
            self.fill(pair.remote, b"".join(bytes([n]) * BLOCK for n in range(64)))
            local, remote = pair.local.blocks(range(10)), pair.remote.blocks(range(20, 30))
            pair.here.read(local.select([0, 1]), remote.select([9, 3])).run()
            assert (pair.local.view[0], pair.local.view[BLOCK]) == (29, 23)
            with fails_with(TransferRefused):
                remote.select([10])

    def test_many_transfers_at_once(self) -> None:
        with self.pair() as pair:
            self.fill(pair.remote, b"".join(bytes([n]) * BLOCK for n in range(64)))
            posted = [
                pair.here.read(pair.local.blocks([n]), pair.remote.blocks([63 - n]), tag=b"%d" % n).post()
                for n in range(64)
            ]
            for future in posted:
                future.result(WAIT_S)
            assert bytes(pair.local.view[::BLOCK]) == bytes(range(63, -1, -1))
            self.eventually(lambda: len(pair.there._inbox._queue) == 64)
            assert {notice.tag for notice in pair.there.notices()} == {b"%d" % n for n in range(64)}

    # Notices

    def test_the_completion_carries_user_bytes(self) -> None:
        with self.pair() as pair:
            expected = pair.there.expect("here", b"tag", WAIT_S)
            pair.here.write(pair.local.blocks([0]), pair.remote.blocks([0]), tag=b"tag", payload=b"first token").run()
            notice = expected.result(WAIT_S)
            assert (notice.payload, notice.num_bytes, notice.peer) == (b"first token", BLOCK, "here")
            assert notice.generation == pair.here.generation

    def test_a_notice_may_come_before_it_is_expected_and_without_a_transfer(self) -> None:
        with self.pair() as pair:
            pair.here.notify("there", b"early", b"bytes")
            self.eventually(lambda: len(pair.there._inbox._queue) == 1)
            assert pair.there.expect("here", b"early", WAIT_S).result(0).payload == b"bytes"

    def test_the_peer_may_begin_too_without_a_second_exchange(self) -> None:
        with self.pair() as pair:
            pair.here.notify("there", b"hello")
            assert pair.there.expect("here", b"hello", WAIT_S).result(WAIT_S)
            pair.there.notify("here", b"answer")
            assert pair.here.expect("there", b"answer", WAIT_S).result(WAIT_S)

    def test_an_expectation_that_nobody_meets_times_out(self) -> None:
        with self.pair() as pair, fails_with(TransferTimeout):
            pair.there.expect("here", b"never", 0.05).result(WAIT_S)

    # Refusals

    def test_lists_that_do_not_match_are_refused(self) -> None:
        with self.pair() as pair:
            local = pair.local.blocks([1, 2])
            for remote in (pair.remote.blocks([1]), pair.remote.blocks([1, 2], block_bytes=256, stride=512)):
                with fails_with(TransferRefused):
                    pair.here.read(local, remote)

    def test_forged_descriptors_are_refused_on_both_sides(self) -> None:
        for write in (False, True):
            self._check_forged(write=write)

    def _check_forged(self, *, write: bool) -> None:
        with self.pair() as pair:
            order = pair.here.write if write else pair.here.read
            good = pair.remote.blocks([0])
            for index, base, stride in ((64, 0, BLOCK), (0, 63 * BLOCK + 1, BLOCK), (2**32 - 1, 2**40, 2**40)):
                runs = index.to_bytes(4, "little") + (1).to_bytes(4, "little")
                forged = Blocks("there", pair.there.generation, good.region, base, stride, BLOCK, runs)
                with fails_with(TransferRefused):
                    order(pair.local.blocks([0]), forged).run()
            unknown = msgspec.structs.replace(good, region=999)
            with fails_with(RegionGone):
                order(pair.local.blocks([0]), unknown).run()
            order(pair.local.blocks([0]), good).run()

    def test_rights_of_a_region_are_kept(self) -> None:
        with self.pair() as pair:
            shown = self.remote_region(pair.there, 8 * BLOCK, access="read")
            pair.here.read(pair.local.blocks([0]), shown.blocks([0])).run()
            with fails_with(TransferRefused):
                pair.here.write(pair.local.blocks([0]), shown.blocks([0])).run()

    def test_a_region_registered_after_the_card_was_sent(self) -> None:
        with self.pair() as pair:
            late = self.remote_region(pair.there, 8 * BLOCK)
            self.fill(late, b"z" * 8 * BLOCK)
            pair.here.read(pair.local.blocks([0]), late.blocks([7])).run()
            assert bytes(pair.local.view[:BLOCK]) == b"z" * BLOCK

    # Failures

    def test_a_transfer_that_is_called_off_ends_so_on_both_sides(self) -> None:
        with self.pair() as pair:
            expected = pair.there.expect("here", b"off", WAIT_S)
            pair.gate.open.clear()
            transfer = pair.here.write(pair.local.blocks([0]), pair.remote.blocks([0]), tag=b"off")
            future = transfer.post()
            assert transfer.check() == "moving"
            with fails_with(TransferError, "still moving"):
                transfer.post()
            assert pair.gate.reached.wait(WAIT_S)
            transfer.cancel()
            self.raises(TransferCancelled, future, expected)
            assert transfer.check() == "failed"
            pair.gate.open.set()
            transfer.run()

    def test_a_deadline_ends_a_transfer_on_both_sides(self) -> None:
        with self.pair() as pair:
            expected = pair.there.expect("here", b"late", WAIT_S)
            pair.gate.open.clear()
            late = pair.here.read(pair.local.blocks([0]), pair.remote.blocks([0]), tag=b"late", timeout_s=0.1)
            self.raises(TransferTimeout, late.post(), expected)

    def test_memory_that_was_taken_back_cannot_be_reached(self) -> None:
        with self.pair() as pair:
            transfer = pair.here.read(pair.local.blocks([0]), pair.remote.blocks([0]), tag=b"gone")
            transfer.run()
            pair.there.unregister(pair.remote)
            with fails_with(RegionGone):
                transfer.run()
            other = self.remote_region(pair.there, 8 * BLOCK)
            pair.here.read(pair.local.blocks([0]), other.blocks([0])).run()

    def test_memory_taken_back_while_it_is_being_moved(self) -> None:
        with self.pair() as pair:
            expected = pair.there.expect("here", b"torn", WAIT_S)
            pair.gate.open.clear()
            future = pair.here.read(pair.local.blocks([0]), pair.remote.blocks([0]), tag=b"torn").post()
            assert pair.gate.reached.wait(WAIT_S)
            pair.there.unregister(pair.remote)
            pair.gate.open.set()
            self.raises(RegionGone, future, expected)

    def test_local_memory_taken_back_ends_the_transfer(self) -> None:
        with self.pair() as pair:
            transfer = pair.here.read(pair.local.blocks([0]), pair.remote.blocks([0]))
            pair.here.unregister(pair.local)
            with fails_with(RegionGone):
                transfer.run()

    def test_a_peer_that_closes_is_lost_on_both_sides(self) -> None:
        with self.pair() as pair:
            pair.gate.open.clear()
            future = pair.here.read(pair.local.blocks([0]), pair.remote.blocks([0]), tag=b"x").post()
            assert pair.gate.reached.wait(WAIT_S)
            pair.there.close()
            self.raises(PeerLost, future)
            with fails_with(PeerLost):
                pair.here.read(pair.local.blocks([0]), pair.remote.blocks([0])).run()

    def test_a_side_that_begins_and_closes_is_lost_to_those_who_expect(self) -> None:
        with self.pair() as pair:
            pair.here.notify("there", b"hello")
            pair.there.expect("here", b"hello", WAIT_S).result(WAIT_S)
            expected = pair.there.expect("here", b"never", WAIT_S)
            pair.here.close()
            self.raises(PeerLost, expected)

    def test_a_peer_that_lives_anew_is_known_by_itself(self) -> None:
        alive: list[Agent] = []
        with self.pair(lookup=lambda _: alive[0].card() if alive else None) as pair:
            transfer = pair.here.read(pair.local.blocks([0]), pair.remote.blocks([0]))
            transfer.run()
            pair.there.close()
            with self.agent("there") as again:
                alive.append(again)
                with fails_with(StaleGeneration):
                    run_until_its_end_is_noticed(transfer)
                fresh = self.remote_region(again, 8 * BLOCK)
                self.fill(fresh, b"n" * 8 * BLOCK)
                pair.here.read(pair.local.blocks([0]), fresh.blocks([3])).run()
                assert bytes(pair.local.view[:BLOCK]) == b"n" * BLOCK

    def test_descriptors_of_another_life_are_refused(self) -> None:
        with self.pair() as pair:
            good = pair.remote.blocks([0])
            for generation in (good.generation - 1, good.generation + 1):
                other = msgspec.structs.replace(good, generation=generation)
                with fails_with(StaleGeneration):
                    pair.here.read(pair.local.blocks([0]), other).run()
            pair.here.read(pair.local.blocks([0]), good).run()

    def test_damage_is_noticed_by_checksums(self) -> None:
        with self.pair() as pair:
            pair.local.view[:] = os.urandom(64 * BLOCK)
            blocks = pair.local.blocks([1, 5, 9]), pair.remote.blocks([2, 3, 4])
            checked = pair.here.write(*blocks, tag=b"sum", checksums=True)
            checked.run()
            expected = pair.there.expect("here", b"sum", WAIT_S)
            assert expected.result(WAIT_S).error is None

            def spoil() -> None:
                self.fill(pair.remote, bytes(3 * BLOCK) + b"!" + bytes(61 * BLOCK - 1))

            pair.gate.spoil = spoil
            expected = pair.there.expect("here", b"sum", WAIT_S)
            with fails_with(DataCorrupted):
                checked.run()
            self.raises(DataCorrupted, expected)

    # Housekeeping

    def test_transfers_teach_the_time_model(self) -> None:
        with self.pair() as pair:
            assert pair.here.estimate_ms("there", BLOCK) == 0
            pair.here.read(pair.local.blocks(range(64)), pair.remote.blocks(range(64))).run()
            assert pair.here.estimate_ms("there", 64 * BLOCK) > 0

    def test_closing_leaves_no_threads_and_no_descriptors(self) -> None:
        with self.pair() as pair:
            pair.here.read(pair.local.blocks([0]), pair.remote.blocks([0])).run()
        self.eventually(lambda: not [t for t in threading.enumerate() if "here" in t.name or "there" in t.name])
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with self.pair() as pair:
                pair.here.read(pair.local.blocks([0]), pair.remote.blocks([0])).run()
            pair.here.close()
        self.eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)

    # Waiting

    def raises(self, kind: type[TransferError], *futures: Future[Any]) -> None:
        for future in futures:
            with fails_with(kind):
                future.result(WAIT_S)

    def eventually(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "never"
            time.sleep(0.005)
