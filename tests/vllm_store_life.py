"""One life of a vLLM engine on the store's connector; run by an interpreter that has vLLM.

    VLLM_PYTHON tests/vllm_store_life.py SOCKET MODEL_FOLDER TOKENS [CONNECTOR]    one JSON line per prompt

CONNECTOR is another class of this module: one that changes each byte that is loaded, or one that loads too little.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from headwater.kv.connectors import vllm_worker
from headwater.kv.connectors.vllm import HeadwaterConnector as Sound
from headwater.kv.node.store import Piece


class DamagingCopier(vllm_worker.BlockCopier):
    def scatter(self, source: torch.Tensor, block_ids: Sequence[int]) -> None:
        super().scatter(source ^ (1 << 6), block_ids)


class DamagingConnector(Sound):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        vllm_worker.BlockCopier = DamagingCopier
        super().register_kv_caches(kv_caches)


class ShortConnector(Sound):
    """Of the first load 10 blocks come, of the second none."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        agent = self._worker._agent
        load, counts = agent.load, iter((10, 0))

        def load_some(chain: Piece, into: Sequence[memoryview], *, timeout_s: float) -> "Future[int]":
            count = next(counts)
            return load(chain.part(0, count), into[:count], timeout_s=timeout_s)

        agent.load = load_some


def main() -> None:
    socket, model, count, *other = sys.argv[1:]
    transfer = KVTransferConfig(
        kv_connector=other[0] if other else "HeadwaterConnector",
        kv_connector_module_path="vllm_store_life" if other else "headwater.kv.connectors.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"socket": socket, "fingerprint": "tiny"},
    )
    engine = LLM(
        model,
        kv_transfer_config=transfer,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=1024,
        max_num_seqs=2,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    for seed in range(2):
        tokens = [3 + (seed * 7919 + number * 104729) % 90 for number in range(int(count))]
        (done,) = engine.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        print(json.dumps({"tokens": list(done.outputs[0].token_ids), "cached": done.num_cached_tokens}), flush=True)


if __name__ == "__main__":
    main()
