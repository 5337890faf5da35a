"""A stand-in for vLLM's connector interface, and a loop that calls a connector in the order in which vLLM 0.32 does.

The KV of a token depends on all tokens before it, so that wrong KV shows in what comes out.
"""

import enum
import pickle
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

INTERFACE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
BLOCK, HEADS, HEAD_SIZE, LAYERS = 4, 2, 8, 3


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024  as published
    pass


class KVConnectorWorkerMetadata(ABC):
    @abstractmethod
    def aggregate(self, other: Any) -> Any: ...


class KVConnectorBase_V1(ABC):  # noqa: N801  as published
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def build_connector_worker_meta(self) -> Any:
        return None

    def update_connector_output(self, connector_output: Any) -> None:
        return

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self) -> None: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...


def names() -> dict[str, Any]:
    """What the connector imports."""
    kinds = (KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, KVConnectorWorkerMetadata)
    return {kind.__name__: kind for kind in kinds}


@dataclass
class FullAttentionSpec:
    block_size: int = BLOCK
    num_kv_heads: int = HEADS
    head_size: int = HEAD_SIZE
    dtype: torch.dtype = torch.float32
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    page_size_padded: int | None = None
    tokens_per_state: int = 1
    kv_quant_mode: Any = field(default_factory=lambda: SimpleNamespace(name="NONE"))

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * 2 * self.head_size * self.dtype.itemsize


def config(socket: str, model: str, *, tp: int = 1, rank: int = 0, heads: int = 0, **parallel: int) -> Any:
    """`heads`: of the model, where a rank has not `HEADS`."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"socket": socket}, kv_load_failure_policy="fail"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, rank=rank, **{"pipeline_parallel_size": 1, **parallel}
        ),
        model_config=SimpleNamespace(
            model=model,
            revision=None,
            dtype=torch.float32,
            quantization=None,
            use_mla=False,
            get_total_num_kv_heads=lambda: heads or tp * HEADS,
            model_arch_config=SimpleNamespace(per_layer_overrides=None),
        ),
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def cache_config(num_blocks: int, groups: int = 1, spec: Any = None) -> Any:
    layers = [f"layer.{number}" for number in range(LAYERS)]
    return SimpleNamespace(
        num_blocks=num_blocks,
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec or FullAttentionSpec())] * groups,
        kv_cache_tensors=[SimpleNamespace(layers=layers)],
        kv_cache_layout="LBHNC",
    )


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    prompt_embeds: Any = None
    pooling_params: Any = None
    mm_features: list[Any] = field(default_factory=list)
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Blocks:
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def get_block_ids(self, _request_id: str = "") -> tuple[list[int], ...]:
        return (self._ids,)


class VllmEngine:
    """One request at a time, without a prefix cache of its own; a worker per rank, each with its own KV."""

    def __init__(
        self,
        connector: Any,
        socket: str,
        model: str,
        *,
        tp: int = 1,
        heads: int = 0,
        num_blocks: int = 64,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """`heads`: of the model; 0: `HEADS` at each rank. `extra`: more of the connector's own configuration."""
        heads = heads or tp * HEADS
        here = max(1, heads // tp)
        self.heads = [range(rank * heads // tp, rank * heads // tp + here) for rank in range(tp)]
        cache = cache_config(num_blocks, spec=FullAttentionSpec(num_kv_heads=here))

        def make(role: KVConnectorRole, rank: int = 0) -> Any:
            made = config(socket, model, tp=tp, rank=rank, heads=heads)
            made.kv_transfer_config.kv_connector_extra_config |= extra or {}
            return connector.HeadwaterConnector(made, role, cache)

        self.scheduler = make(KVConnectorRole.SCHEDULER)
        self.workers = [make(KVConnectorRole.WORKER, rank) for rank in range(tp)]
        shape = (LAYERS, num_blocks, here, BLOCK, 2 * HEAD_SIZE)
        self.kv = [torch.zeros(shape) for _ in range(tp)]
        for worker, kv in zip(self.workers, self.kv, strict=True):
            worker.register_kv_caches({f"layer.{number}": kv[number] for number in range(LAYERS)})
        self.free = list(range(num_blocks))[::-1]
        self.computed = self.failed = 0
        """Prompt tokens computed, not loaded; blocks that did not come."""

    def close(self) -> None:
        for connector in (self.scheduler, *self.workers):
            connector.shutdown()

    def run(self, request: Request, max_tokens: int, chunk: int = 1 << 30) -> list[int]:
        prompt, position = request.num_tokens, 0
        blocks: list[int] = []
        while not position:
            matched, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
            if matched is None:
                self._step(request, blocks, 0, 0, [])
                continue
            assert is_async == (matched > 0)
            assert matched < request.num_tokens
            self._grow(blocks, matched or 1)
            self.scheduler.update_state_after_alloc(request, Blocks(blocks), matched)
            if not matched:
                break
            position = self._load(request, blocks, matched)
        first = True
        while request.num_tokens < prompt + max_tokens:
            scheduled = min(request.num_tokens - position, chunk)
            self._grow(blocks, position + scheduled)
            self._step(request, blocks, position, scheduled, [request] if first else [])
            first = False
            position += scheduled
            if position == request.num_tokens:
                request.all_token_ids.append(self._sample(blocks, position))
        assert self.scheduler.request_finished(request, blocks) == (False, None)
        self.free += blocks
        return request.all_token_ids[prompt:]

    def _load(self, request: Request, blocks: list[int], matched: int) -> int:
        """Steps without computing until the load has ended; how many tokens came."""
        deadline = time.monotonic() + 20
        done: set[int] = set()
        failed: set[int] = set()
        while len(done) < len(self.workers):
            assert time.monotonic() < deadline
            for rank, (finished, wrong) in enumerate(self._step(request, blocks, 0, 0, [])):
                failed |= wrong
                if request.request_id in finished:
                    done.add(rank)
            time.sleep(0.001)
        self.failed += len(failed)
        places = blocks[: matched // BLOCK]
        good = next((number for number, place in enumerate(places) if place in failed), len(places))
        return good * BLOCK

    def _step(
        self, request: Request, blocks: list[int], position: int, scheduled: int, new: list[Request]
    ) -> list[tuple[set[str], set[int]]]:
        going_on = [] if new or not scheduled else [request.request_id]
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=one.request_id, num_computed_tokens=position) for one in new],
            scheduled_cached_reqs=SimpleNamespace(req_ids=going_on, num_computed_tokens=[position] * len(going_on)),
            num_scheduled_tokens={request.request_id: scheduled} if scheduled else {},
            total_num_scheduled_tokens=scheduled,
            kv_connector_block_state=Blocks(blocks),
        )
        metadata = pickle.dumps(self.scheduler.build_connector_meta(output))
        results = []
        for worker, kv, held in zip(self.workers, self.kv, self.heads, strict=True):
            worker.bind_connector_metadata(pickle.loads(metadata))  # noqa: S301 - as vLLM does
            for at in range(position, position + scheduled):
                self._compute(kv, held, blocks, at, request.all_token_ids[at])
            worker.start_load_kv(None)
            worker.wait_for_save()
            _, finished = worker.get_finished(set())
            results.append((finished or set(), worker.get_block_ids_with_load_errors()))
            timed = worker.build_connector_worker_meta()
            worker.clear_connector_metadata()
        self.computed += scheduled
        told = SimpleNamespace(finished_recving=set().union(*(found for found, _ in results)))
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=timed, **vars(told)))
        return results

    def _grow(self, blocks: list[int], tokens: int) -> None:
        while len(blocks) * BLOCK < tokens:
            blocks.append(self.free.pop())

    def _compute(self, kv: torch.Tensor, held: range, blocks: list[int], at: int, token: int) -> None:
        """Of each head another."""
        for number, head in enumerate(held):
            before = float(kv[0, blocks[(at - 1) // BLOCK], number, (at - 1) % BLOCK, 0]) if at else 7.0 + head
            value = (before * 31 + token) % 65_521
            for layer in range(LAYERS):
                kv[layer, blocks[at // BLOCK], number, at % BLOCK] = value + layer

    def _sample(self, blocks: list[int], length: int) -> int:
        """Depends on every head of every block of every layer and rank; the same at all sizes."""
        places = torch.tensor(blocks[: -(-length // BLOCK)])
        copies = [head for held in self.heads for head in held]
        total = 0
        for kv, held in zip(self.kv, self.heads, strict=True):
            for number, head in enumerate(held):
                tokens = kv[:, places, number].reshape(LAYERS, -1, 2 * HEAD_SIZE)[:, :length]
                total += (head + 1) * int(tokens.double().sum()) * 1000 // copies.count(head)
        return total // 1000 % 50_000
