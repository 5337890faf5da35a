"""What TensorRT-LLM turned out to be, once it has loaded and computed a first step."""

import hashlib
from collections.abc import Mapping
from typing import Any

from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo
from headwater.engines.card import served_names, stored_layout, text_artifacts
from headwater.engines.texts import ModelTexts
from headwater.errors import EngineFailed
from headwater.protocol.cluster import ModelCard

_MAX_NUM_TOKENS = 8192
"""TensorRT-LLM's default."""


def engine_info(
    config: EngineConfig,
    texts: ModelTexts,
    llm: Any,
    stats: Mapping[str, Any],
    adapters: list[str],
    stored_by: str = "",
) -> EngineInfo:
    """`stats`: of one iteration. `stored_by`: the release, if it goes to the store of the host."""
    args, model = llm.args, _model_config(llm)
    kv = stats["kvCacheStats"]
    dtype, block_size, num_blocks = str(args.dtype), int(kv["tokensPerBlock"]), int(kv["maxNumBlocks"])
    artifacts, contents = text_artifacts(texts.tokenizer_json, texts.tokenizer_config, texts.chat_template)
    names = served_names(config, texts.name)
    max_model_len = args.max_seq_len or config.max_model_len or getattr(model, "max_position_embeddings", None)
    vocab_size = getattr(model, "vocab_size", None) or getattr(llm.tokenizer, "vocab_size", None)
    if not max_model_len or not vocab_size:
        raise EngineFailed("TensorRT-LLM does not say how long a context may be, or how many tokens there are")
    card = ModelCard(
        name=names[0],
        served_names=[*names, *adapters],
        adapters=adapters,
        fingerprint=hashlib.sha256(f"trtllm {texts.fingerprint} {dtype} {block_size}".encode()).hexdigest(),
        architecture=next(iter(getattr(model, "architectures", None) or ()), "unknown"),
        dtype=dtype,
        kv_layout=_layout(args, f"trtllm.{dtype}.b{block_size}", stored_by),
        max_model_len=int(max_model_len),
        block_size=block_size,
        vocab_size=int(vocab_size),
        bos_token_id=texts.bos_token_id,
        eos_token_ids=list(texts.eos_token_ids),
        artifacts=artifacts,
        default_sampling=texts.default_sampling,
    )
    return EngineInfo(
        engine="trtllm",
        card=card,
        artifacts=contents,
        kv_blocks=num_blocks,
        max_num_seqs=int(args.max_batch_size or config.max_num_seqs),
        max_num_batched_tokens=int(args.max_num_tokens or _MAX_NUM_TOKENS),
        hardware=_hardware(args),
        batch_invariant=False,
        tickets=getattr(args, "cache_transceiver_config", None) is not None,
        store=bool(stored_by),
    )


def _layout(args: Any, name: str, stored_by: str) -> str:
    kv = getattr(args, "kv_cache_config", None)
    kv_dtype = kv.get("dtype") if isinstance(kv, dict) else getattr(kv, "dtype", None)
    return (
        stored_layout(name, (stored_by, str(kv_dtype), str(getattr(args, "quant_config", None)))) if stored_by else name
    )


def _model_config(llm: Any) -> Any:
    """As Hugging Face has it, where TensorRT-LLM has kept it."""
    return getattr(llm, "_hf_model_config", None)


def _hardware(args: Any) -> str:
    """The class of devices, for pooling step times."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "unknown"
    world = int(args.tensor_parallel_size or 1) * int(getattr(args, "pipeline_parallel_size", 1) or 1)
    return f"{name.replace(' ', '-')}x{world}"
