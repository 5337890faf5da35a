"""Which role the configuration gives to which worker of a graph, and how its KV blocks move."""

from headwater.config.schema import ServeConfig
from headwater.errors import ConfigError
from headwater.transfer.options import AgentOptions
from headwater.types import Role


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
    return ("both" if config.disaggregation.role == "adaptive" else config.disaggregation.role), adaptive


def transfer_options(config: ServeConfig) -> AgentOptions:
    """Where sockets of the planes are files, memory is moved within this host only."""
    defaults = AgentOptions()
    bind = config.runtime.bind
    return AgentOptions(
        host=None if bind == "ipc" else "127.0.0.1" if bind == "localhost" else bind,
        backends=config.disaggregation.transfer_backends or defaults.backends,
        checksums=config.disaggregation.transfer_checksums,
    )
