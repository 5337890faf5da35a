"""How many KV blocks an engine gets, and the longest context that follows. Refusals show the arithmetic.

Without an explicit size the KV cache takes a part of the memory that is free when the engine starts, divided among the
workers of the host.
"""

from dataclasses import dataclass

from headwater.config.schema import EngineConfig
from headwater.engines.native.base import NativeModelConfig
from headwater.errors import ConfigError

_DEFAULT_PART = 0.4
"""Of the memory left beside the weights, for the KV caches of all workers of the host together."""
_WORKING_BYTES = 512 * 1024 * 1024
"""Per worker, kept out of that: code, tokenizer, scratch space, the rest of the process."""
_MIB = 1024 * 1024
_MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KvSize:
    """What was decided."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class KvDemand:
    """What the decision rests on, beside the configuration."""

    context_limit: int
    """Positions the model can tell apart."""
    block_bytes: int
    free_bytes: int
    """Beside the weights."""
    num_workers: int = 1


def size_kv(config: EngineConfig, demand: KvDemand) -> KvSize:
    """Raises `ConfigError` when the settings cannot be met, with settings that can."""
    wanted = config.max_model_len or demand.context_limit
    if wanted > demand.context_limit:
        raise ConfigError(
            f"max_model_len is {wanted}, but the model has {demand.context_limit} positions: "
            f"at most --max-model-len {demand.context_limit}"
        )
    num_blocks, source = _num_blocks(config, demand, wanted)
    capacity = num_blocks * config.block_size
    if capacity >= wanted:
        return KvSize(num_blocks, wanted)
    if config.max_model_len is not None or num_blocks < 1:
        needed = -(-wanted // config.block_size)
        nearest = f"--max-model-len {capacity} or " if capacity else ""
        raise ConfigError(
            f"max_model_len {wanted} needs {needed} blocks of {config.block_size} tokens "
            f"({_mib(needed * demand.block_bytes)}), but {source} holds {num_blocks} blocks = {capacity} tokens: "
            f"use {nearest}--kv-cache-memory {-(-needed * demand.block_bytes // _MIB)}MiB"
        )
    return KvSize(num_blocks, capacity)


def _num_blocks(config: EngineConfig, demand: KvDemand, wanted: int) -> tuple[int, str]:
    """How many, and in words why."""
    if config.num_kv_blocks is not None:
        source = f"num_kv_blocks {config.num_kv_blocks}"
        num_blocks = config.num_kv_blocks
    elif config.kv_cache_memory is not None:
        source = f"kv_cache_memory {_mib(config.kv_cache_memory)}"
        num_blocks = config.kv_cache_memory // demand.block_bytes
    else:
        free_bytes = max(demand.free_bytes - demand.num_workers * _WORKING_BYTES, 0)
        budget = int(free_bytes * _DEFAULT_PART / demand.num_workers)
        source = f"{_mib(budget)} ({_DEFAULT_PART:.0%} of {_mib(free_bytes)} free, {demand.num_workers} workers)"
        most = config.max_num_seqs * -(-wanted // config.block_size)
        return min(budget // demand.block_bytes, most, _MAX_BLOCKS), source
    total = num_blocks * demand.block_bytes * demand.num_workers
    if total > demand.free_bytes or num_blocks > _MAX_BLOCKS:
        fits = max(demand.free_bytes, 0) // demand.num_workers // demand.block_bytes
        raise ConfigError(
            f"{source} x {demand.num_workers} workers is {_mib(total)}, but {_mib(demand.free_bytes)} are free beside "
            f"the weights: at most --num-kv-blocks {fits} ({_mib(fits * demand.block_bytes)} per worker)"
        )
    return num_blocks, source


def kv_block_bytes(config: NativeModelConfig, block_size: int, value_bytes: int) -> int:
    """Keys and values of one block over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * block_size * value_bytes


def num_parameters(config: NativeModelConfig) -> int:
    """Weights of the model, tied ones counted once; biases and head norms are left out."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * layer + embeddings + config.hidden_size


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f} MiB"
