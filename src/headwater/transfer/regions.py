"""Regions: memory known to an agent, and how it is taken back.

`Hold` counts who is moving bytes right now. Once it is revoked nobody can take it again, and whoever waits learns when
the last user has let go: only then may the owner use the memory for something else.
"""

import threading
from collections.abc import Callable, Iterable
from types import TracebackType

from headwater.errors import RegionGone, TransferRefused
from headwater.transfer.blocks import Blocks, pack_runs
from headwater.transfer.card import MAX_REGIONS, Access, RegionCard, RegionKind
from headwater.transfer.memory import Buffer


class Hold:
    """Use it as a context around every piece of work on the memory."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._users = 0
        self._on_free: Callable[[], None] | None = None
        self.revoked = False

    def __enter__(self) -> None:
        with self._lock:
            if self.revoked:
                raise RegionGone(f"{self._what} was unregistered")
            self._users += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._users -= 1
            on_free = self._on_free if not self._users else None
        if on_free is not None:
            on_free()

    def check(self) -> None:
        if self.revoked:
            raise RegionGone(f"{self._what} was unregistered")

    def revoke(self, on_free: Callable[[], None]) -> None:
        """`on_free` is called once, when no user is left; at once if there is none."""
        with self._lock:
            if self.revoked:
                return
            self.revoked = True
            free_now = not self._users
            if not free_now:
                self._on_free = on_free
        if free_now:
            on_free()


class Region:
    """Registered memory of this process."""

    def __init__(self, agent: str, generation: int, card: RegionCard, buffer: Buffer) -> None:
        self.agent = agent
        self.generation = generation
        self.card = card
        self.buffer = buffer
        self.hold = Hold(f"region {card.id} of {agent}")
        self.attached: set[object] = set()
        """Sessions whose peer may touch this memory by itself. Touched by the reactor alone."""

    @property
    def view(self) -> memoryview:
        """The bytes; raises `TransferRefused` for memory of a device or a file."""
        if self.buffer.view is None:
            raise TransferRefused(f"region {self.card.id} is a {self.card.kind}: the CPU cannot touch it directly")
        return self.buffer.view

    def blocks(
        self, indices: Iterable[int], *, block_bytes: int | None = None, stride: int | None = None, base: int = 0
    ) -> Blocks:
        """A descriptor of blocks of this region, checked. `block_bytes`, `stride` and `base` default to its own."""
        return describe(
            self.card, self.agent, self.generation, indices, block_bytes=block_bytes, stride=stride, base=base
        )


def describe(
    card: RegionCard,
    agent: str,
    generation: int,
    indices: Iterable[int],
    *,
    block_bytes: int | None = None,
    stride: int | None = None,
    base: int = 0,
) -> Blocks:
    blocks = Blocks(
        agent,
        generation,
        card.id,
        base,
        stride or card.block_bytes,
        block_bytes or card.block_bytes,
        pack_runs(indices),
    )
    blocks.check(card.num_bytes)
    return blocks


class RegionTable:
    """The regions of one agent. Ids are never used again within a life."""

    def __init__(self, agent: str, generation: int) -> None:
        self._agent = agent
        self._generation = generation
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._next = 1

    def add(self, buffer: Buffer, kind: RegionKind, *, name: str, block_bytes: int, access: Access) -> Region:
        if not 0 < block_bytes <= buffer.num_bytes:
            raise TransferRefused(f"blocks of {block_bytes} bytes do not fit a region of {buffer.num_bytes}")
        if buffer.readonly and access != "read":
            raise TransferRefused("read-only memory can be offered for reading only: access='read'")
        with self._lock:
            if len(self._regions) >= MAX_REGIONS:
                raise TransferRefused(f"an agent has at most {MAX_REGIONS} regions: register pools, not tensors")
            card = RegionCard(self._next, name, kind, buffer.num_bytes, block_bytes, access)
            region = Region(self._agent, self._generation, card, buffer)
            self._regions[card.id] = region
            self._next += 1
        return region

    def find(self, region_id: int) -> Region:
        region = self._regions.get(region_id)
        if region is None:
            raise RegionGone(f"{self._agent} has no region {region_id} (any more)")
        return region

    def remove(self, region: Region) -> None:
        with self._lock:
            self._regions.pop(region.card.id, None)

    def cards(self) -> list[RegionCard]:
        with self._lock:
            return [region.card for region in self._regions.values()]

    def all(self) -> list[Region]:
        with self._lock:
            return list(self._regions.values())
