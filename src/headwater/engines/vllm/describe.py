"""What vLLM is to load, and what it turned out to be once it has."""

import hashlib
import os
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo
from headwater.engines.card import served_names, stored_layout, text_artifacts
from headwater.engines.texts import ModelTexts
from headwater.engines.vllm.connectors import Connectors
from headwater.engines.vllm.staging import Staging
from headwater.protocol.cluster import ModelCard


def engine_info(
    config: EngineConfig,
    texts: ModelTexts,
    llm: AsyncLLM,
    adapters: list[str],
    staging: Staging | None,
    connectors: Connectors,
) -> EngineInfo:
    vllm = llm.vllm_config
    model, cache, scheduler = vllm.model_config, vllm.cache_config, vllm.scheduler_config
    dtype = str(model.dtype).removeprefix("torch.")
    artifacts, contents = text_artifacts(texts.tokenizer_json, texts.tokenizer_config, texts.chat_template)
    names = served_names(config, texts.name)
    block_size = int(cache.block_size)
    card = ModelCard(
        name=names[0],
        served_names=[*names, *adapters],
        fingerprint=hashlib.sha256(f"vllm {texts.fingerprint} {dtype} {block_size}".encode()).hexdigest(),
        architecture=model.architecture,
        dtype=dtype,
        kv_layout=staging.layout if staging is not None else _layout(vllm, dtype, stored=connectors.store),
        max_model_len=int(model.max_model_len),
        block_size=block_size,
        vocab_size=int(model.get_vocab_size()),
        bos_token_id=texts.bos_token_id,
        eos_token_ids=list(texts.eos_token_ids),
        artifacts=artifacts,
        kv_bytes_per_token=0 if staging is None else staging.slot_bytes // block_size,
        adapters=adapters,
        default_sampling={name: float(value) for name, value in model.get_diff_sampling_param().items()},
    )
    return EngineInfo(
        engine="vllm",
        card=card,
        artifacts=contents,
        kv_blocks=int(cache.num_gpu_blocks or 1) - 1,
        max_num_seqs=int(scheduler.max_num_seqs),
        max_num_batched_tokens=int(scheduler.max_num_batched_tokens),
        hardware=_hardware(vllm),
        batch_invariant=os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
        tickets=connectors.move and staging is None,
        store=connectors.store,
        num_ranks=int(vllm.parallel_config.tensor_parallel_size),
    )


def _layout(vllm: Any, dtype: str, *, stored: bool) -> str:
    name = f"vllm.{dtype}.b{int(vllm.cache_config.block_size)}"
    if not stored:
        return name
    kernel = torch.backends.cpu.get_cpu_capability() if current_platform.is_cpu() else ""
    details = vllm_version, kernel, vllm.model_config.quantization, vllm.cache_config.cache_dtype
    return stored_layout(name, details)


def _hardware(vllm: Any) -> str:
    """The class of devices, for pooling step times."""
    parallel = vllm.parallel_config
    try:
        name = current_platform.get_device_name()
    except NotImplementedError:
        name = current_platform.device_name
    if current_platform.is_cpu():
        of_one = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "").partition("|")[0]
        name = f"cpu-{of_one.count(',') + 1}t"
    return f"{name.replace(' ', '-')}x{parallel.world_size}"
