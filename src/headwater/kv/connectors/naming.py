"""How a worker of ours has the store's connector in its engine name blocks: as its cluster does, so that routers know
what the store has, and by the tenant that a request speaks for."""

import re
from hashlib import blake2b
from typing import Annotated

import msgspec

from headwater.kv.block import Family, Label

_SALT_MARK = "hw:"
_NAMESPACE = "[0-9a-f]{64}"
_SALT = re.compile(f"{_SALT_MARK}({_NAMESPACE})")


class Naming(msgspec.Struct, frozen=True):
    """Of one request."""

    namespace: Annotated[str, msgspec.Meta(pattern=f"^{_NAMESPACE}$")]
    """Key under which its blocks are hashed."""
    model: Label
    tenant: Label

    def key(self, era: str = "") -> bytes:
        """`era` tells the time before a reset of the cache from that after: then nobody but this engine knows."""
        key = bytes.fromhex(self.namespace)
        return blake2b(era.encode(), key=key, digest_size=len(key)).digest() if era else key

    def family(self, family: Family) -> Family:
        """That of an engine's blocks, for this request."""
        return msgspec.structs.replace(family, model=self.model, tenant=self.tenant)


def salt_of(key: bytes) -> str:
    """The cache salt that carries a namespace."""
    return _SALT_MARK + key.hex()


def namespace_in(salt: str) -> bytes | None:
    """None for a salt that is not of ours, also for one of another client that looks like it."""
    ours = _SALT.fullmatch(salt)
    return bytes.fromhex(ours[1]) if ours is not None else None
