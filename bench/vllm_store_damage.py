"""The connector with a bit of each loaded byte changed, the control of `vllm_store.py`: vLLM loads it by name."""

from collections.abc import Sequence

import torch

from headwater.kv.connectors import vllm_worker
from headwater.kv.connectors.vllm import HeadwaterConnector as Sound


class DamagingCopier(vllm_worker.BlockCopier):
    def scatter(self, source: torch.Tensor, block_ids: Sequence[int]) -> None:
        super().scatter(source ^ 1 << 6, block_ids)


class HeadwaterConnector(Sound):  # type: ignore[misc]
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        vllm_worker.BlockCopier = DamagingCopier  # type: ignore[misc]
        super().register_kv_caches(kv_caches)
