"""From our configuration to the arguments of TensorRT-LLM's `LLM`, which checks them itself.

Any argument of `LLM` is a flag with its name (`--max-batch-size 64`), members of nested ones after a dot
(`--kv-cache-config.free-gpu-memory-fraction 0.8`); values are YAML. The flags of `trtllm-serve` that have other names
are known too, and its options file (`--extra-llm-api-options FILE`). What is said in our words is passed on unless it
was said in TensorRT-LLM's.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headwater.config.schema import EngineConfig
from headwater.config.words import flag_groups
from headwater.engines.base import STORE_FLAGS
from headwater.errors import ConfigError
from headwater.kv.connectors.trtllm_naming import MODULE, connector_config

_log = logging.getLogger(__name__)

_DEFAULTS = EngineConfig()
_EVENT_BUFFER = 65_536
"""Events between two reads, which are a twentieth of a second apart."""

_FIELDS: tuple[tuple[str, str], ...] = (
    ("dtype", "dtype"),
    ("revision", "revision"),
    ("max_model_len", "max_seq_len"),
    ("max_num_seqs", "max_batch_size"),
    ("max_num_batched_tokens", "max_num_tokens"),
    ("tensor_parallel_size", "tensor_parallel_size"),
    ("block_size", "kv_cache_config.tokens_per_block"),
    ("kv_cache_memory", "kv_cache_config.max_gpu_total_bytes"),
)
"""Of ours, and what `LLM` calls them."""
_SERVES_NAMES: Mapping[str, str] = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "ep_size": "moe_expert_parallel_size",
    "cp_size": "context_parallel_size",
    "cluster_size": "moe_cluster_parallel_size",
    "hf_revision": "revision",
    "kv_cache_free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "kv_cache_dtype": "kv_cache_config.dtype",
}
_FILE = "extra_llm_api_options"
_OF_THE_SERVER = frozenset(
    (
        "host",
        "port",
        "log_level",
        "tool_parser",
        "metadata_server_config_file",
        "server_role",
        "num_serve_frontends",
        "num_input_processor_workers",
        "num_media_load_workers",
        "num_postprocess_workers",  # `LLM` has it too: processes that make texts, which frontends do here
    )
)
_ADAPTERS = "lora_modules"


@dataclass(frozen=True, slots=True)
class TrtllmArguments:
    """What TensorRT-LLM is to be started with."""

    llm: dict[str, Any]
    adapters: dict[str, str]
    """LoRA adapters by name: their folders."""
    store: bool
    """Whether we have attached the store of the host to it."""


def trtllm_arguments(config: EngineConfig, model: str, *, store: bool = False) -> TrtllmArguments:
    """`store`: whether this host has one. Raises `ConfigError`."""
    said: dict[str, Any] = {}
    adapters: dict[str, str] = {}
    for group in flag_groups(config.engine_args):
        name, value = _flag(group)
        if name == _FILE:
            _merge(said, _options_file(str(value)))
        elif name == _ADAPTERS:
            adapters |= _adapters([str(word) for word in value] if isinstance(value, list) else [str(value)])
        elif name in _OF_THE_SERVER:
            _log.warning("--%s is for trtllm-serve, which does not run here: it has no effect", name)
        else:
            _put(said, _SERVES_NAMES.get(name, name), value)
    llm = _ours(config)
    _merge(llm, said)
    llm["model"] = model
    if adapters:
        llm["enable_lora"] = True
        llm.setdefault("lora_config", {"lora_dir": list(adapters.values())})
    return TrtllmArguments(llm, adapters, store and _attach_store(llm))


def _attach_store(llm: dict[str, Any]) -> bool:
    """Whether it was attached; not if the operator has done so. Raises `ConfigError`."""
    given = llm.get("kv_connector_config")
    if isinstance(given, dict) and given.get("connector_module") == MODULE:
        return False
    if given:
        raise ConfigError(
            f"--kv-connector-config does not go with {STORE_FLAGS}: TensorRT-LLM has one connector, and the KV store "
            "is to be it",
            hint="leave out the KV store's flags for these workers, or this one",
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        if int(llm.get(name) or 1) > 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} {llm[name]} does not go with {STORE_FLAGS}: with TensorRT-LLM it serves "
                "one rank",
                hint="leave out the KV store's flags for these workers",
            )
    llm["kv_connector_config"] = connector_config()
    return True


def _ours(config: EngineConfig) -> dict[str, Any]:
    """What is needed here, and what the operator has said in our words."""
    kv: dict[str, Any] = {"enable_block_reuse": config.enable_prefix_caching}
    if config.enable_prefix_caching:
        kv["event_buffer_max_size"] = _EVENT_BUFFER
    llm: dict[str, Any] = {"kv_cache_config": kv, "enable_iter_perf_stats": True, "guided_decoding_backend": "xgrammar"}
    for ours, theirs in _FIELDS:
        value = getattr(config, ours)
        if value != getattr(_DEFAULTS, ours):
            _put(llm, theirs, value)
    if config.num_kv_blocks is not None:
        kv["max_tokens"] = config.num_kv_blocks * kv.get("tokens_per_block", config.block_size)
        kv["tokens_per_block"] = kv.get("tokens_per_block", config.block_size)
    if config.tokenizer is not None and Path(config.tokenizer).expanduser().is_dir():
        llm["tokenizer"] = str(Path(config.tokenizer).expanduser())
    return llm


def _flag(group: list[str]) -> tuple[str, Any]:
    """Name and value of one flag and the words that follow it."""
    word, *values = group
    if not word.startswith("--"):
        raise ConfigError(f"TensorRT-LLM: {word!r} belongs to no flag", hint="flags are --name value")
    name, equals, value = word[2:].partition("=")
    if equals:
        values = [value, *values]
    name = name.replace("-", "_")
    if not values:
        return (name[3:], False) if name.startswith("no_") else (name, True)
    try:
        read = [yaml.safe_load(value) for value in values]
    except yaml.YAMLError as error:
        raise ConfigError(f"TensorRT-LLM: the value of --{name} is no YAML: {error}") from error
    return name, read[0] if len(read) == 1 else read


def _put(target: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for name in outer:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            raise ConfigError(f"TensorRT-LLM: --{path} is a member of what was given as a whole")
    target[last] = value


def _merge(target: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            _merge(target[name], value)
        else:
            target[name] = value


def _options_file(name: str) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(Path(name).expanduser().read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"TensorRT-LLM: the options in {name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"TensorRT-LLM: {name} holds no options")
    return found


def _adapters(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not (name and equals and folder):
            raise ConfigError(f"--lora-modules {word}: expected NAME=FOLDER")
        found[name] = folder
    return found
