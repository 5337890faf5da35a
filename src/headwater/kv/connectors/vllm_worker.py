"""The workers' half of the vLLM connector: copies between vLLM's blocks and the store.

A block in the store is a part (`vllm_parts`) of the same block of all layers, one after the other. Layers are gathered
and scattered on the stream that computes, so that they are in order with it; what was gathered crosses to pinned memory
on a stream of its own. Blocks can therefore be given to others at once, while the copy is under way.

Loads come in pieces of bounded size, few at a time; what failed is told to vLLM, which computes it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from headwater.errors import ConfigError, HeadwaterError
from headwater.kv.connectors.chains import Save, socket_path
from headwater.kv.connectors.vllm_layout import Layout
from headwater.kv.connectors.vllm_parts import parts_of
from headwater.kv.connectors.vllm_scheduler import Load
from headwater.kv.node.agent import StoreAgent
from headwater.kv.node.store import Piece

_log = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 20
_PIECES_AT_ONCE = 8
_MAX_SAVING_BYTES = 2 << 30
_CLOSE_S = 30.0


class BlockCopier:
    """Gathers blocks of all layers into host memory and scatters them back, at most `piece_blocks` at a time.

    There a block is its parts one after the other, each of all layers. On a device they pass through two buffers, taken
    in turn; a stream waits until the one it takes is free.
    """

    def __init__(self, kv_caches: dict[str, torch.Tensor], num_blocks: int, num_parts: int = 1) -> None:
        """`num_parts`: 1, or as many as there are heads, which are then the axis behind that of the blocks."""
        self._layers = _distinct(kv_caches, num_blocks)
        self._num_parts = num_parts
        self._widths = [layer[0].numel() * layer.element_size() // num_parts for layer in self._layers]
        self._starts = [sum(self._widths[:number]) for number in range(len(self._widths))]
        self.block_bytes = num_parts * sum(self._widths)
        self.piece_blocks = max(1, _PIECE_BYTES // self.block_bytes)
        self._device = self._layers[0].device
        self._between = (
            None if self._device.type == "cpu" else _Between(self._device, self.piece_blocks, self.block_bytes)
        )

    def staging(self, count: int) -> torch.Tensor:
        """Host memory for so many blocks: pinned where there is a device to copy to."""
        return torch.empty((count, self.block_bytes), dtype=torch.uint8, pin_memory=self._between is not None)

    def gather(self, block_ids: Sequence[int]) -> tuple[torch.Tensor, Callable[[], None]]:
        """The blocks in host memory, once what is returned beside them has returned."""
        target, places = self.staging(len(block_ids)), self._places(block_ids)
        if self._between is None:
            self._collect(target, places)
            return target, lambda: None
        packed = self._between.take(len(block_ids))
        self._collect(packed, places)
        return target, self._between.to_host(packed, target)

    def scatter(self, source: torch.Tensor, block_ids: Sequence[int]) -> None:
        """In order with what is computed on the current stream."""
        places = self._places(block_ids)
        if self._between is None:
            self._distribute(source, places)
            return
        packed = self._between.take(len(block_ids))
        packed.copy_(source, non_blocking=True)
        self._distribute(packed, places)
        self._between.give_back()

    def _collect(self, packed: torch.Tensor, places: torch.Tensor) -> None:
        parts = packed.view(len(places), self._num_parts, -1)
        for layer, start, width in zip(self._layers, self._starts, self._widths, strict=True):
            found = self._heads_first(layer.index_select(0, places)).reshape(len(places), self._num_parts, -1)
            parts[:, :, start : start + width] = found.view(torch.uint8)

    def _distribute(self, packed: torch.Tensor, places: torch.Tensor) -> None:
        parts = packed.view(len(places), self._num_parts, -1)
        for layer, start, width in zip(self._layers, self._starts, self._widths, strict=True):
            shape = self._heads_first(layer[:1]).shape[1:]
            part = parts[:, :, start : start + width].contiguous().view(layer.dtype)
            layer.index_copy_(0, places, self._heads_first(part.reshape(len(places), *shape)))

    def _heads_first(self, blocks: torch.Tensor) -> torch.Tensor:
        """Before the kernel blocks of a block, or back, where heads are parts."""
        return blocks.transpose(1, 2) if self._num_parts > 1 else blocks

    def _places(self, block_ids: Sequence[int]) -> torch.Tensor:
        places = torch.tensor(block_ids, dtype=torch.int64, pin_memory=self._between is not None)
        return places.to(self._device, non_blocking=True)


class _Between:
    """Buffers on the device, and the stream on which blocks cross to the host."""

    def __init__(self, device: torch.device, piece_blocks: int, block_bytes: int) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._side = self._module.Stream(device)
        shape = (piece_blocks, block_bytes)
        self._buffers = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(2)]
        self._free = [self._module.Event(), self._module.Event()]
        self._turn = 0

    def take(self, count: int) -> torch.Tensor:
        self._turn ^= 1
        self._current().wait_event(self._free[self._turn])
        return self._buffers[self._turn][:count]

    def give_back(self) -> None:
        """Free once the current stream is done with it."""
        self._free[self._turn].record(self._current())

    def to_host(self, packed: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """After what the current stream has been given so far. Returns what waits for it."""
        self._side.wait_stream(self._current())
        with self._module.stream(self._side):
            target.copy_(packed, non_blocking=True)
        self._free[self._turn].record(self._side)
        done = self._module.Event()
        done.record(self._side)
        wait: Callable[[], None] = done.synchronize
        return wait

    def _current(self) -> Any:
        return self._module.current_stream(self._device)


@dataclass(slots=True)
class _Loading:
    """A load and the pieces of it that are still to come."""

    load: Load
    until: float
    pieces: int
    good: int
    """Leading blocks that are not known to have failed."""


@dataclass(slots=True)
class _Arriving:
    loading: _Loading
    start: int
    buffer: torch.Tensor
    loaded: "Future[int]"


class WorkerHalf:
    """See the module docstring. Called from the thread that drives the device."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        layout: Layout,
        socket: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._configs = vllm_config, kv_cache_config
        self._layout, self._clock = layout, clock
        rank = vllm_config.parallel_config.rank
        self._rank = rank % layout.num_ranks
        self._parts = parts_of(vllm_config, kv_cache_config, layout, self._rank)
        self._agent = StoreAgent(socket_path(socket), f"vllm-{rank}")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="kv-save")
        self._copier: BlockCopier | None = None
        self._waiting: deque[tuple[_Loading, int, int]] = deque()
        self._arriving: list[_Arriving] = []
        self._ended: set[str] = set()
        self._failed: set[int] = set()
        self._saving: deque[tuple[Future[None], int]] = deque()
        self.num_saves_dropped = 0

    def close(self) -> None:
        self._saver.shutdown()
        self._agent.close()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._parts = parts_of(*self._configs, self._layout, self._rank, kv_caches.values())
        self._copier = BlockCopier(kv_caches, self._layout.num_blocks, len(self._parts.held))
        if self._copier.block_bytes != self._layout.block_bytes:
            seen, told = self._copier.block_bytes, self._layout.block_bytes
            raise ConfigError(f"blocks have {seen} bytes in memory and {told} by vLLM's configuration")

    def start_loads(self, loads: Sequence[Load]) -> None:
        if not loads:
            return
        step = self._blocks().piece_blocks
        for load in loads:
            starts = range(0, load.chain.num_blocks, step)
            loading = _Loading(load, self._clock() + load.timeout_s, len(starts), load.chain.num_blocks)
            self._waiting += [(loading, at, min(at + step, load.chain.num_blocks)) for at in starts]
        self._start_waiting()

    @torch.inference_mode()
    def advance(self) -> set[str]:
        """Put in place what has come; the requests of which nothing is to come any more."""
        for piece in [piece for piece in self._arriving if piece.loaded.done()]:
            self._arriving.remove(piece)
            self._place(piece)
        self._start_waiting()
        ended, self._ended = self._ended, set()
        return ended

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    @torch.inference_mode()
    def save(self, saves: Sequence[Save]) -> None:
        """Copies are taken in order with computing; the store gets them meanwhile. What is too much is not saved."""
        while self._saving and self._saving[0][0].done():
            self._saving.popleft()
        for save in saves if self._parts.writes else ():
            step = self._blocks().piece_blocks
            for start in range(0, save.chain.num_blocks, step):
                self._save(save.chain.part(start, min(start + step, save.chain.num_blocks)), save.block_ids[start:])

    # Inside

    def _save(self, chain: Piece, block_ids: Sequence[int]) -> None:
        size = chain.num_blocks * self._layout.block_bytes
        if self._saving and sum(num_bytes for _, num_bytes in self._saving) + size > _MAX_SAVING_BYTES:
            if not self.num_saves_dropped:
                _log.warning("the KV store is behind: some blocks are not saved")
            self.num_saves_dropped += chain.num_blocks
            return
        buffer, wait = self._blocks().gather(block_ids[: chain.num_blocks])
        self._saving.append((self._saver.submit(self._offer, chain, buffer, wait), size))

    def _start_waiting(self) -> None:
        while self._waiting and len(self._arriving) < _PIECES_AT_ONCE:
            loading, start, end = self._waiting.popleft()
            left_s = loading.until - self._clock()
            if start >= loading.good or left_s <= 0:
                self._end_piece(loading, min(loading.good, start))
                continue
            buffer = self._blocks().staging(end - start)
            parts = self._parts.split(loading.load.chain.part(start, end), buffer)
            loaded = self._agent.load_parts(parts, timeout_s=left_s)
            self._arriving.append(_Arriving(loading, start, buffer, loaded))

    def _place(self, piece: _Arriving) -> None:
        try:
            count = piece.loaded.result()
        except HeadwaterError as error:
            _log.warning("loading from the KV store failed, blocks are computed: %s", error)
            count = 0
        if count:
            places = piece.loading.load.block_ids[piece.start : piece.start + count]
            self._blocks().scatter(piece.buffer[:count], places)
        good = piece.loading.good if count == len(piece.buffer) else min(piece.loading.good, piece.start + count)
        self._end_piece(piece.loading, good)

    def _end_piece(self, loading: _Loading, good: int) -> None:
        loading.good = good
        loading.pieces -= 1
        if loading.pieces:
            return
        self._ended.add(loading.load.request_id)
        self._failed.update(loading.load.block_ids[good:])
        if good < loading.load.chain.num_blocks:
            _log.info("%d of %d blocks came from the KV store", good, loading.load.chain.num_blocks)

    def _offer(self, chain: Piece, buffer: torch.Tensor, wait: Callable[[], None]) -> None:
        try:
            wait()
            offered = [self._agent.offer(part, rows) for part, rows in self._parts.split(chain, buffer)]
            for part in offered:
                part.result(_CLOSE_S)
        except (HeadwaterError, TimeoutError) as error:
            _log.warning("saving to the KV store failed: %s", error)

    def _blocks(self) -> BlockCopier:
        if self._copier is None:
            raise ConfigError("vLLM has not registered its KV caches")
        return self._copier


def _distinct(kv_caches: dict[str, torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    """One view per layer that has memory of its own, blocks first; in wide words, which copy faster."""
    found: dict[int, torch.Tensor] = {}
    for name, cache in kv_caches.items():
        if not isinstance(cache, torch.Tensor) or cache.shape[0] % num_blocks or cache.stride(-1) != 1:
            raise ConfigError(f"the KV cache of {name} is not made of {num_blocks} blocks")
        found.setdefault(cache.data_ptr(), _by_block(_as_words(cache), num_blocks))
    if not found:
        raise ConfigError("the model has no KV cache")
    return list(found.values())


def _by_block(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Kernels may take smaller blocks than the engine manages."""
    return cache.view(num_blocks, cache.shape[0] // num_blocks, *cache.shape[1:])


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    for dtype in (torch.int64, torch.int32):
        ratio = dtype.itemsize // cache.element_size()
        sizes = (cache.shape[-1], cache.storage_offset(), *cache.stride()[:-1])
        if ratio and not any(size % ratio for size in sizes):
            return cache.view(dtype)
    return cache.view(torch.uint8)
