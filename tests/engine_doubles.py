"""Stand-ins for the published plug-in interfaces of SGLang and TensorRT-LLM, and loops that call them as those engines
do. Neither engine can be installed on a machine without its GPU libraries."""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

STORAGE_BATCH = 128
"""Pages per call, as in SGLang's controller."""


def install(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A module of that name, and its parents."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    for key, value in content.items():
        setattr(sys.modules[name], key, value)


# SGLang 0.5.23


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Every pool of the group, that of KV pages among them."""
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...


@dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "a/model"
    extra_config: dict[str, Any] | None = None


@dataclass
class ExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class HostPool:
    """Pages of 16 tokens in memory."""

    layout = "page_first"
    page_size = 16

    def __init__(self, pages: int = 300, width: int = 256) -> None:
        self.kv = torch.zeros(pages * self.page_size, width, dtype=torch.bfloat16)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.page_size * self.kv.shape[1], dtype=self.kv.dtype)

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        page = self.kv[int(index) : int(index) + self.page_size]
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index: Any, data_page: torch.Tensor) -> None:
        self.kv[int(index) : int(index) + self.page_size] = data_page.reshape(self.page_size, -1)


class HiCacheController:
    """The order of calls of SGLang's controller with `interface_v1`, and without."""

    def __init__(self, storage: Any, pool: HostPool, pools: tuple[str, ...] = ("kv",)) -> None:
        self.storage, self.pool = storage, pool
        storage.register_mem_pool_host(pool)
        for name in pools:
            storage.register_mem_host_pool_v2(pool, name)

    def backup(self, keys: list[str], indices: torch.Tensor, prefix_keys: list[str] | None = None) -> int:
        """Pages written."""
        prefix_keys = list(prefix_keys) if prefix_keys else None
        done = 0
        for batch, part in self._batches(keys, indices):
            if not all(self.storage.batch_set_v1(batch, part, ExtraInfo(prefix_keys))):
                break
            if prefix_keys:
                prefix_keys += batch
            done += len(batch)
        return done

    def query(self, keys: list[str], prefix_keys: list[str] | None = None) -> int:
        prefix_keys = list(prefix_keys) if prefix_keys else None
        hits = 0
        for start in range(0, len(keys), STORAGE_BATCH):
            batch = keys[start : start + STORAGE_BATCH]
            found = self.storage.batch_exists(batch, ExtraInfo(prefix_keys))
            hits += found
            if found < len(batch):
                break
            if prefix_keys:
                prefix_keys += batch
        return hits

    def prefetch(self, keys: list[str], indices: torch.Tensor, prefix_keys: list[str] | None = None) -> int:
        """Pages that came."""
        keys = keys[: self.query(keys, prefix_keys)]
        prefix_keys = list(prefix_keys) if prefix_keys else None
        done = 0
        for batch, part in self._batches(keys, indices):
            results = self.storage.batch_get_v1(batch, part, ExtraInfo(prefix_keys))
            good = results.index(False) if False in results else len(results)
            done += good
            if good < len(batch):
                break
            if prefix_keys:
                prefix_keys += batch
        return done

    def backup_generic(self, keys: list[str], indices: torch.Tensor) -> bool:
        size = self.pool.page_size
        pages = [self.pool.get_data_page(indices[number * size]) for number in range(len(keys))]
        return bool(self.storage.batch_set(keys, pages))

    def prefetch_generic(self, keys: list[str], indices: torch.Tensor) -> int:
        pages = self.storage.batch_get(keys, [self.pool.get_dummy_flat_data_page() for _ in keys])
        done = 0
        for page in pages:
            if page is None:
                break
            self.pool.set_from_flat_data_page(indices[done * self.pool.page_size], page)
            done += 1
        return done

    def _batches(self, keys: list[str], indices: torch.Tensor) -> list[tuple[list[str], torch.Tensor]]:
        size = self.pool.page_size
        return [
            (keys[start : start + STORAGE_BATCH], indices[start * size : (start + STORAGE_BATCH) * size])
            for start in range(0, len(keys), STORAGE_BATCH)
        ]


# TensorRT-LLM 1.4


class _Half(ABC):  # noqa: B024  as published
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None


class KvCacheConnectorWorker(_Half):
    def bind_connector_meta(self, metadata: Any) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        return self._metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(self, finished: list[int], started: list[int]) -> tuple[list[int], list[int]]: ...


class KvCacheConnectorScheduler(_Half):
    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


@dataclass
class KvCacheConfig:
    tokens_per_block: int = 4


@dataclass
class LlmArgs:
    model: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)


@dataclass
class LlmRequest:
    request_id: int
    tokens: list[int]
    cache_salt: str | None = None
    lora_task_id: int | None = None

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.tokens


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)
    cache_salt: str | None = None


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class Stream:
    def synchronize(self) -> None:
        pass


class Executor:
    """A tiny engine whose KV of a token depends on all tokens so far, so that wrong KV shows in what comes out."""

    def __init__(self, scheduler: Any, worker: Any, args: LlmArgs, num_blocks: int = 64) -> None:
        self.scheduler, self.worker = scheduler, worker
        self.size = args.kv_cache_config.tokens_per_block
        self.kv = torch.zeros(num_blocks, 2, self.size, dtype=torch.int64)
        self.free = list(range(num_blocks))
        self.computed = 0
        """Prompt tokens computed, not loaded."""
        worker.register_kv_caches(self.kv)

    def run(self, request: LlmRequest, max_tokens: int, chunk: int = 1 << 30) -> list[int]:
        matched, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert not is_async
        assert matched < len(request.tokens)
        blocks: list[int] = []
        told_tokens = told_blocks = 0
        position, loaded = matched, matched
        prompt = len(request.tokens)
        while len(request.tokens) < prompt + max_tokens:
            scheduled = min(len(request.tokens) - position, chunk)
            while len(blocks) * self.size < position + scheduled:
                blocks.append(self.free.pop())
            if not told_tokens:
                self.scheduler.update_state_after_alloc(request, blocks)
            data = RequestData(
                request.request_id, request.tokens[told_tokens:], blocks[told_blocks:], position - loaded, scheduled
            )
            output = SchedulerOutput(*([data], []) if not told_tokens else ([], [data]))
            told_tokens, told_blocks, loaded = len(request.tokens), len(blocks), 0
            self._step(request, blocks, position, scheduled, output)
            position += scheduled
            if position == len(request.tokens):
                request.tokens.append(self._sample(blocks, position))
        assert self.worker.get_finished([], []) == ([], [])
        assert not self.scheduler.request_finished(request, blocks)
        self.free += blocks
        return request.tokens[prompt:]

    def _step(
        self, request: LlmRequest, blocks: list[int], position: int, scheduled: int, output: SchedulerOutput
    ) -> None:
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(Stream())
        self.worker.wait_for_layer_load(0, Stream())
        for at in range(position, position + scheduled):
            before = int(self.kv[blocks[(at - 1) // self.size], 0, (at - 1) % self.size]) if at else 7
            value = (before * 31 + request.tokens[at]) % 1_000_003
            self.kv[blocks[at // self.size], :, at % self.size] = value
            self.computed += 1
        self.worker.save_kv_layer(0, Stream())
        self.worker.wait_for_save(Stream())

    def _sample(self, blocks: list[int], length: int) -> int:
        """Depends on every block."""
        total = sum(int(self.kv[blocks[at // self.size], 1, at % self.size]) for at in range(length))
        return total % 50_000
