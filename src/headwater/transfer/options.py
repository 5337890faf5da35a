"""Settings of an agent. Every wait and every queue is bounded by one of them."""

from dataclasses import dataclass

from headwater.errors import ConfigError
from headwater.transfer.auth import MIN_KEY_BYTES
from headwater.transfer.sealing import check_available


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The defaults suit a worker in a cluster of one network."""

    key: bytes | None = None
    """Shared by all agents of a cluster. None: each agent makes a token that travels in its card."""
    host: str | None = "127.0.0.1"
    """Address to listen on for peers of other hosts; None listens on the Unix socket only."""
    encrypt: bool = False
    """Seal what goes over TCP. All agents of a cluster must agree on it."""
    advertised_host: str | None = None
    """What the card says instead of `host`, where that is 0.0.0.0 or behind a translation."""
    backends: tuple[str, ...] = ("shm", "cma", "cuda", "nixl", "tcp", "file", "object")
    """The best first."""
    heartbeat_s: float = 1.0
    peer_timeout_s: float = 4.0
    """A peer silent for so long is lost: both sides of a transfer learn of a failure within this time and a second."""
    movers: int = 4
    """Threads that move bytes for transfers that were posted."""
    max_posted: int = 1024
    max_streams: int = 256
    """Data streams served at once."""
    max_notices: int = 4096
    checksums: bool = False
    """Compare checksums of every block on both sides after each transfer."""

    def __post_init__(self) -> None:
        if self.key is not None and len(self.key) < MIN_KEY_BYTES:
            raise ConfigError(f"a key of {len(self.key)} bytes is too short: at least {MIN_KEY_BYTES}")
        if self.encrypt:
            check_available()
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError("peer_timeout_s must be at least two heartbeats")
        if self.host in ("0.0.0.0", "::") and self.advertised_host is None:
            raise ConfigError(f"listening on {self.host} needs an advertised_host: the address that peers can reach")
