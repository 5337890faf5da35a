"""Ranges of objects in a store as memory that can be read: where one lies, and which URLs may be read at all.

A URL that a peer names is believed no further than a list of prefixes that this side was given: whoever could name any
URL would read with our credentials, inside our network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from headwater.errors import ConfigError, TransferRefused
from headwater.transfer.blocks import Size

SCHEMES = ("s3", "gs", "az", "https", "http")
MAX_URL_CHARS = 2048


class ObjectRange(msgspec.Struct, frozen=True, array_like=True):
    """`num_bytes` bytes of an object from `offset` on. Register it to have it read like memory."""

    url: Annotated[str, msgspec.Meta(max_length=MAX_URL_CHARS)]
    offset: Size
    num_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 50)]


@dataclass(frozen=True, slots=True)
class Location:
    """Of an object: a store, and the key in it."""

    store: str
    key: str


def locate(url: str) -> Location:
    """Raise `TransferRefused` for anything but the plain URL of an object."""
    scheme, _, rest = url.partition("://")
    host, _, key = rest.partition("/")
    bad = "%" in url or "?" in url or "#" in url or "\\" in url or not url.isprintable()
    if scheme not in SCHEMES or not key or bad or len(url) > MAX_URL_CHARS or not host:
        raise TransferRefused(f"not the URL of an object: {url[:200]!r} (one of {', '.join(SCHEMES)}, without escapes)")
    if any(part in ("", ".", "..") for part in key.split("/")) or "@" in host:
        raise TransferRefused(f"the URL of an object has no empty or dotted parts and no credentials: {url[:200]!r}")
    return Location(f"{scheme}://{host}", key)


def check_prefixes(prefixes: Sequence[str]) -> tuple[str, ...]:
    """Prefixes of URLs that may be read. Raises `ConfigError`."""
    for prefix in prefixes:
        if not prefix.endswith("/") or prefix.partition("://")[0] not in SCHEMES:
            raise ConfigError(f"{prefix!r} is no prefix of objects: a URL of {', '.join(SCHEMES)} that ends with /")
    return tuple(prefixes)
