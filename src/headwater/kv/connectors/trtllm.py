"""The node's store as a KV cache connector of a stock TensorRT-LLM (PyTorch back-end).

    KvCacheConnectorConfig(connector_module="headwater.kv.connectors.trtllm",
                           connector_scheduler_class="HeadwaterScheduler", connector_worker_class="HeadwaterWorker")

The socket of `headwater kv serve` is the user's default one, or `HEADWATER_KV_SOCKET`. A worker of ours attaches it by
itself and names blocks as its cluster does (`trtllm_naming`); what the worker has not named is left alone then. Written
against the connector interface of TensorRT-LLM 1.4.

TensorRT-LLM takes a promise of matched tokens for granted and has no way back. So blocks are loaded, checked and held
in memory before they are promised; nothing can be promised that does not come. That ties loading to the leader's
process: one rank (tensor and pipeline parallelism of 1), one pool of blocks. Requests with LoRA or multimodal input are
left to TensorRT-LLM's own cache.
"""

import logging
import threading
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    RequestData,
)

from headwater.errors import ConfigError, HeadwaterError
from headwater.kv.block import Family
from headwater.kv.connectors.chains import RequestChain, Save, socket_path
from headwater.kv.connectors.names import NamesTold
from headwater.kv.connectors.naming import namespace_in
from headwater.kv.connectors.trtllm_naming import Attached
from headwater.kv.identity import namespace
from headwater.kv.node.agent import StoreAgent
from headwater.kv.node.store import Piece

_log = logging.getLogger(__name__)

_ASK_S = 0.05
"""TensorRT-LLM's loop waits for it."""
_LOAD_S = 2.0
_MIN_LOAD_S = 0.25
_PATIENCE = 4.0
"""A load may take so many times what was predicted."""
_SAVE_S = 10.0
_MAX_HELD_BYTES = 4 << 30
_NO_PAGE = -1


@dataclass
class StepTransfers:
    """What the worker does around one forward pass."""

    loads: list[tuple[int, bytearray]] = field(default_factory=list)
    """Block id and what belongs there."""
    saves: list[Save] = field(default_factory=list)


class Attachment:
    """What the scheduler and the worker of one executor share, which TensorRT-LLM makes apart in one process."""

    def __init__(self, llm_args: Any) -> None:
        sizes = (llm_args.tensor_parallel_size, llm_args.pipeline_parallel_size)
        if sizes != (1, 1):
            raise ConfigError(f"this connector serves one rank, not tensor and pipeline parallelism of {sizes}")
        if "cache_salt" not in {one.name for one in fields(RequestData)}:
            raise ConfigError(
                "this TensorRT-LLM tells connectors of no cache salts, which keep blocks of tenants apart"
            )
        self.block_tokens = int(llm_args.kv_cache_config.tokens_per_block)
        self.model = str(llm_args.model)
        self.layout = ""
        self.payload_bytes = 0
        """0 until the worker has seen the blocks."""
        found = Attached.found()
        self.names = NamesTold(Path(found.names)) if found is not None else None
        self.store = StoreAgent(socket_path(found.socket if found is not None else None), "trtllm")
        if found is not None:
            found.acknowledge()

    def close(self) -> None:
        self.store.close()
        if self.names is not None:
            self.names.close()

    def describe(self, blocks: torch.Tensor) -> None:
        first = blocks[0]
        self.payload_bytes = first.numel() * first.element_size()
        self.layout = f"trtllm.{blocks.dtype}.{'x'.join(map(str, first.shape))}"

    def new_chain(self, salt: str) -> RequestChain | None:
        """None: the worker has not named it."""
        if self.names is not None:
            return self._named_chain(self.names, salt)
        family = Family(self.model, self.layout, salt, self.payload_bytes)
        return RequestChain(family, namespace(self.model, self.layout, salt=salt), self.block_tokens)

    def _named_chain(self, names: NamesTold, salt: str) -> RequestChain | None:
        key = namespace_in(salt)
        named = names.find(key) if key is not None else None
        if named is None:
            return None
        family = named.naming.family(Family("", self.layout, "", self.payload_bytes))
        return RequestChain(family, named.naming.key(), self.block_tokens)


_attachments: dict[str, Attachment] = {}
_attaching = threading.Lock()


def _attachment(llm_args: Any) -> Attachment:
    """One per model and process: the two halves have nothing in common but their arguments, and are made on two threads
    at the same time."""
    with _attaching:
        found = _attachments.get(str(llm_args.model))
        if found is None:
            found = _attachments[str(llm_args.model)] = Attachment(llm_args)
        return found


def detach_all() -> None:
    """Let the stores go, at the end of a process that is not ended by a signal."""
    while _attachments:
        _attachments.popitem()[1].close()


@dataclass(slots=True)
class _Request:
    chain: RequestChain
    tokens: list[int] = field(default_factory=list[int])
    block_ids: list[int] = field(default_factory=list[int])
    held: list[bytearray] = field(default_factory=list[bytearray])
    """Promised blocks, checked, not yet handed to the worker."""
    held_from: int = 0
    num_saved: int = 0
    """Leading blocks that are in the store or need not go there."""


class HeadwaterScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    """The leader's half: what is loaded before a step and saved after it."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._shared = _attachment(llm_args)
        self._requests: dict[int, _Request] = {}
        self._held_bytes = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Loads, and promises what has come. At least one token stays to be computed."""
        self._forget(request.request_id)
        shared, size = self._shared, self._shared.block_tokens
        if not shared.payload_bytes or not _is_plain(request):
            return 0, False
        tokens, first = list(request.get_tokens(0)), num_computed_tokens // size
        chain = shared.new_chain(str(request.cache_salt or ""))
        if chain is None:
            return 0, False
        state = self._requests[request.request_id] = _Request(chain, num_saved=first)
        wanted = chain.upto(tokens, (len(tokens) - 1) // size)
        if num_computed_tokens % size or first >= wanted.num_blocks:
            return 0, False
        state.held_from, state.held = first, self._load(wanted.part(first, wanted.num_blocks), len(tokens))
        self._held_bytes += len(state.held) * shared.payload_bytes
        return len(state.held) * size, False

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Some of what was promised is not wanted any more: from the front or from the back."""
        state = self._requests.get(request.request_id)
        if state is None or not state.held:
            return
        size = self._shared.block_tokens
        last = state.held_from + len(state.held)
        gone_from, gone_to = max(state.held_from, start // size), min(last, -(-end // size))
        if gone_from >= gone_to:
            return
        kept = state.held[gone_to - state.held_from :] if gone_from == state.held_from else None
        self._held_bytes -= (gone_to - gone_from) * self._shared.payload_bytes
        if kept is not None:
            state.held, state.held_from = kept, gone_to
        else:
            del state.held[gone_from - state.held_from :]

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Block ids are taken from the scheduler's output."""

    def build_connector_meta(self, scheduler_output: Any) -> StepTransfers:
        step = StepTransfers()
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            state = self._requests.get(data.request_id)
            if state is None:
                continue
            state.tokens += data.new_tokens
            state.block_ids += _block_ids(data)
            num_loaded = self._hand_over(state, step)
            self._save(state, data, num_loaded, step)
        return step

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Everything was saved in the step that computed it."""
        self._forget(request.request_id)
        return False

    def request_reset(self, request: Any) -> None:
        """Its blocks were taken away; it begins anew."""
        self._forget(request.request_id)

    def _load(self, chain: Piece, num_tokens: int) -> list[bytearray]:
        """What comes sooner than it is computed, if it is known what that takes. The engine waits for it."""
        shared = self._shared
        runs = shared.store.match(chain, timeout_s=2 * _ASK_S, ask_s=_ASK_S)
        found, timeout_s = sum(run.num_blocks for run in runs), _LOAD_S
        if (rate := shared.names.rate() if shared.names is not None else None) is not None:
            plan = shared.store.client.plan(
                chain,
                runs,
                rate.prefill_ms,
                num_tokens=num_tokens,
                cached_tokens=chain.first * shared.block_tokens,
                block_tokens=shared.block_tokens,
            )
            found, timeout_s = plan.num_blocks, min(_LOAD_S, max(_MIN_LOAD_S, _PATIENCE * plan.load_ms / 1e3))
        room = max(0, _MAX_HELD_BYTES - self._held_bytes) // shared.payload_bytes
        chain = chain.part(0, min(found, room))
        if not chain.num_blocks:
            return []
        buffers = [bytearray(shared.payload_bytes) for _ in range(chain.num_blocks)]
        try:
            loading = shared.store.load(chain, [memoryview(one) for one in buffers], timeout_s=timeout_s)
            return buffers[: loading.result(2 * _LOAD_S)]
        except (HeadwaterError, TimeoutError) as error:
            _log.warning("the KV store does not answer, blocks are computed: %s", error)
            return []

    def _hand_over(self, state: _Request, step: StepTransfers) -> int:
        """How many leading blocks of the request are in place before this step."""
        if not state.held:
            return state.num_saved
        end = state.held_from + len(state.held)
        if len(state.block_ids) < end:
            raise ConfigError(f"{end} blocks were promised and places for {len(state.block_ids)} given")
        step.loads += zip(state.block_ids[state.held_from : end], state.held, strict=True)
        self._held_bytes -= len(state.held) * self._shared.payload_bytes
        state.held = []
        state.num_saved = end
        return end

    def _save(self, state: _Request, data: Any, num_loaded: int, step: StepTransfers) -> None:
        """What the step makes full. `computed_position` leaves out what was loaded for this very step."""
        size = self._shared.block_tokens
        computed = max(data.computed_position, num_loaded * size) + data.num_scheduled_tokens
        full = min(computed // size, len(state.tokens) // size, len(state.block_ids))
        if full <= state.num_saved:
            return
        chain = state.chain.upto(state.tokens, full).part(state.num_saved, full)
        block_ids = state.block_ids[state.num_saved : full]
        state.num_saved = full
        if _NO_PAGE not in block_ids:
            step.saves.append(Save(chain, block_ids))

    def _forget(self, request_id: int) -> None:
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._held_bytes -= len(state.held) * self._shared.payload_bytes


class HeadwaterWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """Copies between the blocks of the device and memory, before and after the forward pass."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._shared = _attachment(llm_args)
        self._blocks: torch.Tensor | None = None

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """The first dimension counts blocks."""
        self._blocks = kv_cache_tensor
        self._shared.describe(kv_cache_tensor)

    def start_load_kv(self, stream: Any) -> None:
        for block_id, payload in self._step().loads:
            block = self._block(block_id)
            source = torch.frombuffer(payload, dtype=torch.uint8).view(block.dtype)
            block.copy_(source.reshape(block.shape))

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Loaded as a whole before the first layer."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Saved as a whole after the last layer."""

    def wait_for_save(self, stream: Any) -> None:
        saves = self._step().saves
        if not saves:
            return
        stream.synchronize()
        for save in saves:
            copies = [self._block(block_id).to("cpu", copy=True) for block_id in save.block_ids]
            # A store that is behind drops offers by itself.
            self._shared.store.offer(save.chain, [_bytes_of(copy) for copy in copies])

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Nothing of a request is under way between steps."""
        return [], []

    def _step(self) -> StepTransfers:
        step: StepTransfers | None = self.get_connector_meta()
        return step if step is not None else StepTransfers()

    def _block(self, block_id: int) -> torch.Tensor:
        if self._blocks is None:
            raise ConfigError("TensorRT-LLM has not registered its KV blocks")
        return self._blocks[block_id]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _is_plain(request: Any) -> bool:
    """Its tokens say all about its KV."""
    names = ("lora_task_id", "multimodal_hashes", "multimodal_positions", "multimodal_lengths")
    return all(getattr(request, name, None) is None for name in names)


def _block_ids(data: Any) -> list[int]:
    groups = data.new_block_ids_by_layer_group
    if len(groups) > 1:
        raise ConfigError(f"this connector serves one pool of blocks, not {len(groups)} layer groups")
    return list(groups[0] if groups else data.new_block_ids)
