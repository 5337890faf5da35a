"""The keyring: tenants, and the keys that speak for them. Holds digests of keys, never keys.

One JSON document; `headwater keys` writes it and frontends read it. Keys are 256 bits drawn by us, so one round of
SHA-256 is all the hashing that they need: there is nothing to guess. Refuses documents that are larger than any
honest one, name unknown tenants, or hold members that this version does not know.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Literal

import msgspec

from headwater.errors import ConfigError

Scope = Literal["inference", "metrics", "admin", "delegate"]
"""`inference`: models and answers. `metrics`: numbers. `admin`: everything about the cluster. `delegate`: may name
another tenant in `x-tenant-id`, for gateways."""
SCOPES: tuple[Scope, ...] = ("inference", "metrics", "admin", "delegate")

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
KEY_PATTERN = re.compile(r"hw-[0-9a-f]{8}-[A-Za-z0-9_-]{43}")
_ID_BYTES = 4
_SECRET_BYTES = 32

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
Quantity = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class TenantSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a tenant may take. None means no limit."""

    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    """Share of worker time when not all can be served at once."""
    max_concurrent: Quantity | None = None
    """Requests in progress."""
    tokens_per_minute: Quantity | None = None
    """Prompt and output tokens; a minute's worth may be taken at once."""
    monthly_tokens: Quantity | None = None
    """Prompt and output tokens per calendar month (UTC)."""
    kv_group: Name | None = None
    """Tenants of one group share cached prefixes; None: nobody shares this one's."""
    kv_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Most of the cache tiers that its blocks may fill while others want room."""

    @property
    def has_quotas(self) -> bool:
        return bool(self.max_concurrent or self.tokens_per_minute or self.monthly_tokens)


class KeySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    tenant: Name
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    scopes: tuple[Scope, ...] = ("inference",)
    created: datetime | None = None
    expires: datetime | None = None
    """From then on it is refused. Revoked keys are ones that expired when they were revoked."""
    note: Annotated[str, msgspec.Meta(max_length=200)] = ""

    def expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires


class Keyring(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The document."""

    format: Literal["headwater-keyring"]
    version: Literal[1]
    tenants: dict[Name, TenantSpec] = {}
    keys: dict[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8}$")], KeySpec] = {}

    @classmethod
    def empty(cls) -> "Keyring":
        return cls("headwater-keyring", 1)

    @property
    def has_quotas(self) -> bool:
        return any(tenant.has_quotas for tenant in self.tenants.values())


def decode_keyring(document: bytes, where: str) -> Keyring:
    """Raises `ConfigError`, which names the member at fault and shows no digest."""
    if len(document) > MAX_DOCUMENT_BYTES:
        raise ConfigError(f"{where}: {len(document):,} bytes; a keyring has at most {MAX_DOCUMENT_BYTES:,}")
    try:
        keyring = msgspec.json.decode(document, type=Keyring)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{where}: not a keyring: {error}", hint="`headwater keys create` makes one") from error
    for key_id, key in keyring.keys.items():
        if key.tenant not in keyring.tenants:
            raise ConfigError(f"{where}: key {key_id} belongs to tenant {key.tenant!r}, which is not in `tenants`")
    digests = [key.sha256 for key in keyring.keys.values()]
    if len(set(digests)) < len(digests):
        raise ConfigError(f"{where}: two of the keys are the same key")
    return keyring


def encode_keyring(keyring: Keyring) -> bytes:
    return msgspec.json.format(msgspec.json.encode(keyring), indent=2) + b"\n"


def new_key(taken: Iterable[str]) -> tuple[str, str]:
    """(id, key): the key is shown once and kept nowhere; the id is part of it and may be shown."""
    used = set(taken)
    key_id = secrets.token_hex(_ID_BYTES)
    while key_id in used:
        key_id = secrets.token_hex(_ID_BYTES)
    return key_id, f"hw-{key_id}-{secrets.token_urlsafe(_SECRET_BYTES)}"


def key_digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
