"""Which role the configuration gives to which worker of a graph, and how its KV blocks move."""

import logging

import msgspec

from headwater.config.schema import EngineConfig, ServeConfig
from headwater.errors import ConfigError
from headwater.runtime.loopback import is_loopback
from headwater.transfer.memory import available_bytes
from headwater.transfer.options import AgentOptions
from headwater.transfer.sealing import check_available
from headwater.types import Role

_log = logging.getLogger(__name__)

_KV_STAGING_BYTES = 4 << 30
_KV_STAGING_PART = 8
"""The most of what is free."""


def num_workers(config: ServeConfig) -> int:
    """Of the graph. Raises `ConfigError` for one that could not answer."""
    if config.prefill and not config.decode:
        raise ConfigError(f"--prefill {config.prefill} without --decode: nobody would generate", hint="add --decode 1")
    return config.prefill + config.decode or config.workers


def role_of(config: ServeConfig, index: int) -> tuple[Role, bool]:
    """The role a worker begins with, and whether it may be given another one. Pools come in the order prefill, decode;
    what comes after them, and workers without pools, are what `role` says."""
    adaptive = config.disaggregation.role == "adaptive"
    if index < config.prefill:
        return "prefill", adaptive
    if index < config.prefill + config.decode:
        return "decode", adaptive
    role = config.disaggregation.role
    return ("both" if role == "adaptive" else role), adaptive


def engine_of(config: ServeConfig, index: int) -> EngineConfig:
    """The engine of a worker: vLLM with memory for hand-offs, where its role asks for that."""
    engine = config.engine
    if engine.engine != "vllm" or engine.attach or engine.kv_staging is not None:
        return engine
    if role_of(config, index) == ("both", False):
        return engine
    num_bytes = min(_KV_STAGING_BYTES, available_bytes() // _KV_STAGING_PART)
    return msgspec.structs.replace(engine, kv_staging=num_bytes)


def transfer_options(config: ServeConfig) -> AgentOptions:
    """Where sockets of the planes are files, memory is moved within this host only; where they are encrypted, it is
    moved encrypted or not at all."""
    disagg, bind = config.disaggregation, config.runtime.bind
    host = None if bind == "ipc" else "127.0.0.1" if bind == "localhost" else bind
    encrypt = host is not None and config.runtime.cluster_key is not None and not is_loopback(host)
    if encrypt:
        try:
            check_available()
        except ConfigError as error:
            _log.warning("KV blocks are moved within this host only: %s (%s)", error, error.hint)
            host, encrypt = None, False
    return AgentOptions(
        host=host,
        encrypt=encrypt,
        backends=disagg.transfer_backends or AgentOptions().backends,
        checksums=disagg.transfer_checksums,
    )
