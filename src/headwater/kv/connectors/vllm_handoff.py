"""Hand-off of KV blocks between vLLM workers, as a KV connector of a stock vLLM below a worker of ours.

`headwater.engines.vllm` sets it up, for workers that prefill or decode for others. Blocks of a prompt that others want
are copied to slots of host memory as steps compute them, and vLLM's own blocks are free at once; a request whose KV has
arrived in slots is admitted, waits a step or more while it is copied, and goes on with its last token. What is not in
the slots is computed: nothing here can fail a request. Written against the connector interface of vLLM 0.32.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from headwater.kv.connectors.vllm_handoff_worker import HandoffWorker, SlotExport, SlotLoad
from headwater.kv.connectors.vllm_layout import Layout
from headwater.kv.connectors.vllm_staging import ExportParams, LoadParams, StagingAddress


@dataclass
class HandoffStep(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do around one step."""

    loads: list[SlotLoad] = field(default_factory=list[SlotLoad])
    exports: list[SlotExport] = field(default_factory=list[SlotExport])
    ended: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _Export:
    params: ExportParams
    num_prompt_tokens: int
    num_out: int = 0
    """Blocks, from the first one that is wanted on."""


class HandoffScheduler:
    """The half in vLLM's scheduler."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._exports: dict[str, _Export] = {}
        self._step = HandoffStep()

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens are in slots. A request that was preempted after its load is computed."""
        load = LoadParams.of(request.kv_transfer_params)
        if load is None or request.num_preemptions or num_computed_tokens < load.first_block * self._size:
            return 0, False
        count = min(load.num_tokens, request.num_tokens) - num_computed_tokens
        return (count, True) if count > 1 else (0, False)

    def allocated(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        export = ExportParams.of(params)
        if export is not None and request.request_id not in self._exports:
            self._exports[request.request_id] = _Export(export, request.num_prompt_tokens)
        load = LoadParams.of(params)
        if load is not None and num_external_tokens:
            num_tokens = min(load.num_tokens, request.num_tokens)
            first, end = (num_tokens - num_external_tokens) // self._size, -(-num_tokens // self._size)
            slots = load.slots[first - load.first_block : end - load.first_block]
            self._step.loads.append(SlotLoad(request.request_id, slots, list(block_ids[first:end])))

    def step(self, output: Any) -> HandoffStep:
        """Everything for the step that vLLM has just planned."""
        if self._exports:
            cached = output.scheduled_cached_reqs
            computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            for request_id, count in output.num_scheduled_tokens.items():
                export = self._exports.get(request_id)
                if export is not None:
                    places = output.kv_connector_block_state.get_block_ids(request_id)
                    self._export(export, computed[request_id] + count, places[0] if places is not None else ())
        step, self._step = self._step, HandoffStep()
        return step

    def finished(self, request: Any) -> None:
        self._exports.pop(request.request_id, None)
        export = ExportParams.of(request.kv_transfer_params)
        if export is not None:
            self._step.ended.append(export.stream)

    def _export(self, export: _Export, num_computed: int, places: Any) -> None:
        """Blocks that are full after the step; with the whole prompt, the one that is not full too."""
        whole = num_computed >= export.num_prompt_tokens
        end = -(-export.num_prompt_tokens // self._size) if whole else num_computed // self._size
        params, first = export.params, export.params.first_block + export.num_out
        end = min(end, params.first_block + len(params.slots), len(places))
        if end <= first:
            return
        slots = params.slots[export.num_out : end - params.first_block]
        export.num_out = end - params.first_block
        self._step.exports.append(SlotExport(params.stream, list(places[first:end]), slots, export.num_out))


class HandoffConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module docstring. Has one of the two halves, by its role."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        layout = Layout.of(vllm_config, kv_cache_config, "")
        self._scheduler: HandoffScheduler | None = None
        self._worker: HandoffWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = HandoffScheduler(layout.block_tokens)
        else:
            address = StagingAddress.of(dict(transfer.kv_connector_extra_config or {}))
            self._worker = HandoffWorker(vllm_config, kv_cache_config, layout, address)

    @property
    def requires_kv_delivery(self) -> bool:
        """Who does not get its blocks computes them."""
        return False

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # Scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._of_scheduler().match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.kv_transfer_params:
            self._of_scheduler().allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> HandoffStep:
        return self._of_scheduler().step(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may go: what others want was copied in the step that computed it."""
        self._of_scheduler().finished(request)
        return False, None

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._of_worker().register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._of_worker().start_loads(self._planned().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads have ended before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are copied after the last layer, so that CUDA graphs stay whole as well."""

    def wait_for_save(self) -> None:
        step = self._planned()
        self._of_worker().export(step.exports)
        self._of_worker().end(step.ended)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._of_worker().advance() or None

    def _planned(self) -> HandoffStep:
        step = self._connector_metadata
        return step if isinstance(step, HandoffStep) else HandoffStep()

    def _of_scheduler(self) -> HandoffScheduler:
        assert self._scheduler is not None, "asked of a worker"
        return self._scheduler

    def _of_worker(self) -> HandoffWorker:
        assert self._worker is not None, "asked of the scheduler"
        return self._worker
