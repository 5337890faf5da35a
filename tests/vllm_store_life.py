"""One life of a vLLM engine on the store's connector; run by an interpreter that has vLLM.

    VLLM_PYTHON tests/vllm_store_life.py SOCKET MODEL_FOLDER TOKENS [damage]    one JSON line per prompt

With `damage`, each byte that is loaded is changed before it is put in place.
"""

import json
import sys
from collections.abc import Sequence

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from headwater.kv.connectors import vllm_worker
from headwater.kv.connectors.vllm import HeadwaterConnector as Sound


class DamagingCopier(vllm_worker.BlockCopier):
    def scatter(self, source: torch.Tensor, block_ids: Sequence[int]) -> None:
        super().scatter(source ^ (1 << 6), block_ids)


class DamagingConnector(Sound):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        vllm_worker.BlockCopier = DamagingCopier
        super().register_kv_caches(kv_caches)


def main() -> None:
    socket, model, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    damage = sys.argv[4:] == ["damage"]
    transfer = KVTransferConfig(
        kv_connector="DamagingConnector" if damage else "HeadwaterConnector",
        kv_connector_module_path="vllm_store_life" if damage else "headwater.kv.connectors.vllm",
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
        tokens = [3 + (seed * 7919 + number * 104729) % 90 for number in range(count)]
        (done,) = engine.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        print(json.dumps({"tokens": list(done.outputs[0].token_ids), "cached": done.num_cached_tokens}), flush=True)


if __name__ == "__main__":
    main()
