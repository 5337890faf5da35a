"""The node's store as a KV connector of a stock vLLM.

    --kv-transfer-config '{"kv_connector": "HeadwaterConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "headwater.kv.connectors.vllm"}'

Keys of `kv_connector_extra_config`: `socket` (where `headwater kv serve` listens; default the user's own place) and
`fingerprint` (what tells these weights from others; default the model's name and revision). A worker of ours attaches
it by itself and has its requests say how their blocks are named (`vllm_naming`). Written against the
connector interface of vLLM 0.32, which makes one half in the scheduler's process and one in each worker's.

Blocks are named by `headwater.kv.identity`, not by vLLM's hashes, which differ between processes. Loads are
asynchronous: the engine goes on with other requests. A load that fails is recomputed, so `kv_load_failure_policy` is
set to that. Pipeline and context parallelism, and models whose layers need several pools of blocks, are refused.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from headwater.kv.connectors.vllm_layout import Layout
from headwater.kv.connectors.vllm_naming import named_by_worker
from headwater.kv.connectors.vllm_parts import parts_of
from headwater.kv.connectors.vllm_scheduler import SchedulerHalf, StepTransfers
from headwater.kv.connectors.vllm_worker import WorkerHalf


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """What goes from the scheduler to the workers with each step."""

    transfers: StepTransfers = field(default_factory=StepTransfers)


@dataclass
class StepEnded(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What comes back: which of the steps that are timed has been computed."""

    number: int

    def aggregate(self, other: "StepEnded") -> "StepEnded":
        return self


class HeadwaterConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module docstring. Has one of the two halves, by its role."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        transfer.kv_load_failure_policy = "recompute"
        extra = dict(transfer.kv_connector_extra_config or {})
        layout = Layout.of(vllm_config, kv_cache_config, str(extra.get("fingerprint", "")))
        self._socket = str(extra.get("socket", "")) or None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            parts = parts_of(vllm_config, kv_cache_config, layout, 0)
            self._scheduler = SchedulerHalf(layout, parts, self._socket, named_by_worker=named_by_worker(extra))
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, layout, self._socket)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later."""
        return False

    def shutdown(self) -> None:
        half = self._scheduler or self._worker
        if half is not None:
            half.close()

    # Scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._of_scheduler().match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._of_scheduler().load(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        return Metadata(self._of_scheduler().step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        timed = connector_output.kv_connector_worker_meta
        self._of_scheduler().step_ended(
            timed.number if timed is not None else 0, connector_output.finished_recving or ()
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may go: what is saved was copied in the step that computed it."""
        self._of_scheduler().forget(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """The weights may have changed: nothing stored before is found from now on."""
        self._of_scheduler().begin_anew()
        return True

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._of_worker().register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._of_worker().start_loads(self._transfers().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads have ended before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are saved after the last layer, so that CUDA graphs stay whole as well."""

    def wait_for_save(self) -> None:
        self._of_worker().save(self._transfers().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._of_worker().advance() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._of_worker().take_failed()

    def build_connector_worker_meta(self) -> StepEnded | None:
        number = self._transfers().number
        return StepEnded(number) if number else None

    def _transfers(self) -> StepTransfers:
        return self._connector_metadata.transfers if self._connector_metadata is not None else StepTransfers()

    def _of_scheduler(self) -> SchedulerHalf:
        assert self._scheduler is not None, "asked of a worker"
        return self._scheduler

    def _of_worker(self) -> WorkerHalf:
        assert self._worker is not None, "asked of the scheduler"
        return self._worker
