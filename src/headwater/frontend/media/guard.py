"""Which URLs of clients may be fetched, and from which address exactly.

Whoever fetches media does it in this order: `check_url`, resolve the host's name, `pinned_address` with all that came
out, connect to that address and no other (the name goes into Host and SNI), and the same again for every redirect. A
name that resolves to something else the next time (DNS rebinding) so leads nowhere: it is resolved once, and what is
connected to is what was checked. Pure: no I/O here.

Refused: schemes beside https (http if allowed), credentials, ports beside the usual ones, names without a dot, names
and addresses of this host, this network, link-local (cloud metadata), multicast, reserved and IPv4-in-IPv6 forms of
all of these, and numbers spelled in ways that only some resolvers read as addresses.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headwater.errors import InvalidRequest

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_URL_CHARS = 2048
_PORTS = {"https": 443, "http": 80}
_LABEL = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)")
_LOCAL_SUFFIXES = ("localhost", "local", "internal", "intranet", "lan", "home", "corp", "localdomain", "home.arpa")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_METADATA = (ipaddress.ip_address("100.100.100.200"), ipaddress.ip_address("fd00:ec2::254"))


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    schemes: frozenset[str] = frozenset(("https",))
    hosts: frozenset[str] = frozenset()
    """Names allowed, with all below them; none: every public one."""
    ports: frozenset[int] = field(default_factory=lambda: frozenset(_PORTS.values()))


@dataclass(frozen=True, slots=True)
class MediaTarget:
    """A URL that may be tried."""

    scheme: str
    host: str
    """For name resolution, Host and SNI."""
    port: int
    path: str
    """With the query."""


def check_url(url: str, policy: MediaPolicy, *, param: str) -> MediaTarget:
    """Raises `InvalidRequest`, which names `param` and does not repeat the URL."""
    if len(url) > MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise _refused(param, f"is no plain URL of at most {MAX_URL_CHARS} ASCII characters")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower().rstrip("."), parts.port
    except ValueError:
        raise _refused(param, "is no URL") from None
    if parts.scheme not in policy.schemes:
        raise _refused(param, f"must begin with {' or '.join(sorted(f'{s}://' for s in policy.schemes))}")
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise _refused(param, "must not hold credentials")
    port = _PORTS[parts.scheme] if port is None else port
    if port not in policy.ports:
        raise _refused(param, f"has port {port}, allowed are {', '.join(map(str, sorted(policy.ports)))}")
    _check_host(host, policy, param)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return MediaTarget(parts.scheme, host, port, path)


def pinned_address(target: MediaTarget, resolved: Iterable[str], *, param: str) -> str:
    """The one address to connect to. All that the name resolves to must be public: a mixed answer is an attack."""
    addresses = [_parsed(text) for text in resolved]
    if not addresses:
        raise _refused(param, f"names the host {target.host}, which has no address")
    if not all(address is not None and is_public(address) for address in addresses):
        raise _refused(param, f"names the host {target.host}, which leads into a network that is not public")
    return str(addresses[0])


def is_public(address: Address) -> bool:
    """Whether anybody on the internet could be meant, and nobody in here."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = _embedded(address)
        if inner is not None:
            return is_public(inner)
    if address in _METADATA or address.is_multicast or address.is_unspecified:
        return False
    return address.is_global and not address.is_reserved


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _check_host(host: str, policy: MediaPolicy, param: str) -> None:
    literal = _parsed(host)
    if literal is not None:
        if policy.hosts or not is_public(literal):
            raise _refused(param, "names an address that may not be asked")
        return
    labels = host.split(".")
    if len(labels) < 2 or len(host) > 253 or not all(map(_LABEL.fullmatch, labels)) or not labels[-1].isalpha():
        # The last label of a name has letters alone; what has not is an address in some spelling (0x7f.1, 2130706433).
        raise _refused(param, "names no public host")
    if any(host == suffix or host.endswith(f".{suffix}") for suffix in _LOCAL_SUFFIXES):
        raise _refused(param, "names a host of a local network")
    if policy.hosts and not any(host == name or host.endswith(f".{name}") for name in policy.hosts):
        raise _refused(param, "names a host that is not on the list")


def _parsed(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _refused(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the URL in {param} {reason}", param=param)
