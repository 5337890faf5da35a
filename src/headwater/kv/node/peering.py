"""This node among others: what it offers them and what it reads from them, over one transfer agent.

Nodes of one cluster share a key, in a file closed to others. Without one, peers are of this host only.
"""

import asyncio
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from headwater.clock import Clock
from headwater.errors import ConfigError
from headwater.kv.space import PAGE_BYTES
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.peer import PeerOptions, PeerTier
from headwater.kv.stores.peer_offer import PeerOffer
from headwater.runtime.loopback import is_loopback
from headwater.transfer.agent import Agent
from headwater.transfer.auth import MIN_KEY_BYTES
from headwater.transfer.options import AgentOptions

_MAX_KEY_BYTES = 4096
_ANY_PORT_HOST = "127.0.0.1"

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PeeringOptions:
    """`listen`: where this node offers its host tier, by a name that the others can reach; None: not at all."""

    listen: Address | None = None
    peers: tuple[Address, ...] = ()
    key: bytes = b""

    def __post_init__(self) -> None:
        addresses = [*self.peers, *([self.listen] if self.listen else [])]
        distant = next((host for host, _ in addresses if not is_loopback(host)), None)
        if distant is not None and not self.key:
            raise ConfigError(
                f"the peer address {distant} is not of this host, and there is no key: others could read all KV",
                hint="make a file with 32 random bytes, copy it to all nodes, and name it with --peer-key",
            )


def parse_address(text: str) -> Address:
    """`host:port`, `[::1]:port`. Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"an address is given as host:port, not {text!r}")
    return host.strip("[]"), int(port)


def read_key(path: Path) -> bytes:
    """Raises `ConfigError`, which shows no key."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            key = file.read(_MAX_KEY_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from None
    if found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"the key {path} can be read by others", hint=f"chmod 600 {path}")
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"the key {path} has {len(key)} bytes: at least {MIN_KEY_BYTES} are needed")
    return key


class Peering:
    """See the module docstring. Made on the event loop of the store."""

    def __init__(self, options: PeeringOptions, clock: Clock) -> None:
        host = options.listen[0] if options.listen else _ANY_PORT_HOST
        self.options = options
        self.agent = Agent(f"kv-{secrets.token_hex(8)}", AgentOptions(key=options.key or None, host=host), clock=clock)
        self.tier: PeerTier | None = None
        if options.peers:
            self.tier = PeerTier(PeerOptions(options.peers), self.agent, options.key, clock=clock)
        self._offer: PeerOffer | None = None
        self.port = 0

    async def start(self, host: HostTier) -> None:
        """Raises `ConfigError` when the address is taken."""
        pool = self.agent.register(host.pool.data, block_bytes=PAGE_BYTES, name="kv", access="read")
        if self.tier is not None:
            self.tier.land_in(pool)
        if self.options.listen is not None:
            self._offer = PeerOffer(host, self.agent, pool, self.options.key)
            self.port = await self._offer.listen(*self.options.listen)

    async def close(self) -> None:
        """Idempotent. Afterwards nobody here touches the host tier's memory any more."""
        if self._offer is not None:
            await self._offer.close()
        if self.tier is not None:
            await self.tier.close()
        await asyncio.to_thread(self.agent.close)
