"""One life of a vLLM engine on the store's connector; run by an interpreter that has vLLM.

    VLLM_PYTHON tests/vllm_store_life.py SOCKET MODEL_FOLDER TOKENS [--size N] [--connector NAME]

One JSON line per prompt. `--size`: of tensor parallelism. `--connector`: another class of this module, one that changes
each byte that is loaded, or one that loads too little.
"""

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from headwater.kv.connectors import vllm_worker
from headwater.kv.connectors.vllm import HeadwaterConnector as Sound
from headwater.kv.node.client import Part


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
        load, counts = agent.load_parts, iter((10, 0))

        def load_some(parts: Sequence[Part], *, timeout_s: float) -> "Future[int]":
            count = next(counts)
            return load([(chain.part(0, count), into[:count]) for chain, into in parts], timeout_s=timeout_s)

        agent.load_parts = load_some


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("model")
    parser.add_argument("tokens", type=int)
    parser.add_argument("--connector")
    parser.add_argument("--size", type=int, default=1)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(given.size))
    transfer = KVTransferConfig(
        kv_connector=given.connector or "HeadwaterConnector",
        kv_connector_module_path="vllm_store_life" if given.connector else "headwater.kv.connectors.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"socket": given.socket, "fingerprint": "tiny"},
    )
    engine = LLM(
        given.model,
        tensor_parallel_size=given.size,
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
        tokens = [3 + (seed * 7919 + number * 104729) % 90 for number in range(given.tokens)]
        (done,) = engine.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        print(json.dumps({"tokens": list(done.outputs[0].token_ids), "cached": done.num_cached_tokens}), flush=True)


if __name__ == "__main__":
    main()
