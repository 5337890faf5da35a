"""Reading and writing blocks on a few threads, vectored where blocks lie side by side.

A call that was begun is finished before its caller is told anything, also when the caller is cancelled: until then the
kernel may touch the buffers. A medium that does not answer at all therefore holds its callers; `stalled_s` says for how
long, so that no others are sent after them.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from headwater.clock import Clock
from headwater.kv.checksum import PART_BYTES, Checksum, checksum
from headwater.kv.space import PAGE_BYTES
from headwater.kv.stores.finishing import finished
from headwater.transfer.memory import address_of

_MAX_VECTORS = 256
_MAX_GROUP_BYTES = 1 << 20
_MAX_SUMMED_BYTES = 512 << 10
"""Of a group whose bytes a processor has moved: so much of it is still in its cache when it is summed."""


class Piece(NamedTuple):
    """One block of a call."""

    number: int
    offset: int
    view: memoryview
    id: bytes
    checksum: int


class Outcome(NamedTuple):
    """By number of the piece."""

    done: list[int]
    damaged: list[int]
    failed: list[int]


class DiskIo:
    """`direct_fd` is used for blocks that are aligned in memory and whole pages long; -1 if it is not to be used."""

    def __init__(self, fd: int, direct_fd: int, num_threads: int, clock: Clock) -> None:
        self._fd, self._direct_fd = fd, direct_fd
        self._clock = clock
        # Through the page cache it is processors that move bytes: more threads than those only get in each other's way.
        self._num_lanes = num_threads if direct_fd >= 0 else min(num_threads, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-disk")
        self._begun: dict[int, float] = {}

    async def write(self, pieces: Sequence[Piece]) -> Outcome:
        return await self._run(groups_of(pieces), self._write_group)

    async def read(self, pieces: Sequence[Piece], *, check: bool = True) -> Outcome:
        """What is `done` has been checked in its buffer, unless that is not wanted."""
        if not check:
            return await self._run(groups_of(pieces), self._read_unchecked)
        most = _MAX_GROUP_BYTES if self._direct_fd >= 0 else _MAX_SUMMED_BYTES
        return await self._run(groups_of(pieces, most), self._read_group)

    def stalled_s(self) -> float:
        """How long the oldest group has been under way."""
        return self._clock.now() - min(list(self._begun.values()), default=self._clock.now())

    def close(self, *, wait: bool) -> None:
        self._threads.shutdown(wait=wait)

    async def _run(self, groups: list[list[Piece]], work: Callable[[list[Piece]], Outcome]) -> Outcome:
        loop = asyncio.get_running_loop()
        lanes = [groups[lane :: self._num_lanes] for lane in range(min(self._num_lanes, len(groups)))]
        running = [loop.run_in_executor(self._threads, self._timed, work, lane) for lane in lanes]
        outcomes = await finished(asyncio.gather(*running, return_exceptions=True))
        total = Outcome([], [], [])
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            for part, more in zip(total, outcome, strict=True):
                part.extend(more)
        return total

    def _timed(self, work: Callable[[list[Piece]], Outcome], lane: list[list[Piece]]) -> Outcome:
        total = Outcome([], [], [])
        for group in lane:
            self._begun[id(lane)] = self._clock.now()
            try:
                outcome = work(group)
            finally:
                del self._begun[id(lane)]
            for part, more in zip(total, outcome, strict=True):
                part.extend(more)
        return total

    def _write_group(self, group: list[Piece]) -> Outcome:
        return self._move(os.pwritev, group)

    def _read_unchecked(self, group: list[Piece]) -> Outcome:
        return self._move(os.preadv, group)

    def _read_group(self, group: list[Piece]) -> Outcome:
        if len(group) == 1 and len(group[0].view) > PART_BYTES and not self._goes_direct(group):
            return self._read_in_parts(group[0])
        outcome = self._read_unchecked(group)
        if outcome.failed:
            return outcome
        damaged = [piece.number for piece in group if checksum(piece.id, piece.view) != piece.checksum]
        return Outcome([number for number in outcome.done if number not in damaged], damaged, [])

    def _read_in_parts(self, piece: Piece) -> Outcome:
        """Through the page cache: summed while it is still in the cache of the processor."""
        total = Checksum(piece.id)
        try:
            for start in range(0, len(piece.view), PART_BYTES):
                part = piece.view[start : start + PART_BYTES]
                _whole(os.preadv, self._fd, [part], piece.offset + start)
                total.add(part)
        except OSError:
            return Outcome([], [], [piece.number])
        whole = total.value() == piece.checksum
        return Outcome([piece.number], [], []) if whole else Outcome([], [piece.number], [])

    def _goes_direct(self, group: list[Piece]) -> bool:
        return self._direct_fd >= 0 and all(map(_aligned, group))

    def _move(self, call: Callable[[int, Sequence[memoryview], int], int], group: list[Piece]) -> Outcome:
        numbers = [piece.number for piece in group]
        fd = self._direct_fd if self._goes_direct(group) else self._fd
        try:
            _whole(call, fd, [piece.view for piece in group], group[0].offset)
        except OSError:
            return Outcome([], [], numbers)
        return Outcome(numbers, [], [])


def groups_of(pieces: Sequence[Piece], max_bytes: int = _MAX_GROUP_BYTES) -> list[list[Piece]]:
    """Pieces that lie side by side together, each group of at most so many bytes or one piece."""
    groups: list[list[Piece]] = []
    end, group_bytes = -1, 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        size = len(piece.view)
        if piece.offset != end or group_bytes + size > max_bytes or len(groups[-1]) == _MAX_VECTORS:
            groups.append([])
            group_bytes = 0
        groups[-1].append(piece)
        group_bytes += size
        end = piece.offset + size
    return groups


def _aligned(piece: Piece) -> bool:
    return len(piece.view) % PAGE_BYTES == 0 and address_of(piece.view) % PAGE_BYTES == 0


def _whole(call: Callable[[int, Sequence[memoryview], int], int], fd: int, views: list[memoryview], start: int) -> None:
    """All of it, or `OSError`. Short counts are seldom: a signal, a medium that ends."""
    wanted = sum(map(len, views))
    moved = call(fd, views, start)
    while moved < wanted:
        skip, rest = moved, list[memoryview]()
        for view in views:
            rest.append(view[min(skip, len(view)) :])
            skip -= min(skip, len(view))
        more = call(fd, [view for view in rest if len(view)], start + moved)
        if more <= 0:
            raise OSError(f"the file ends at byte {start + moved}")
        moved += more
