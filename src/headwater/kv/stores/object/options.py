"""What is set about an object tier, and its one-line spelling:

    s3://bucket/prefix?cap=1TiB&ttl=7d&region=eu-central-1
    az://container/prefix      gs://bucket/prefix      s3://bucket/prefix?endpoint=http://127.0.0.1:9000

Credentials never belong here: they come from the environment, a profile or the machine's identity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, urlsplit

from headwater.config.units import parse_bytes, parse_seconds
from headwater.errors import ConfigError
from headwater.kv.stores.object.runs import MIN_OBJECT_BYTES, TARGET_OBJECT_BYTES

SCHEMES = ("s3", "az", "gs")
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """The defaults suit a bucket of the same region."""

    scheme: str
    bucket: str
    prefix: str = ""
    endpoint: str = ""
    """For servers other than the cloud's own; `http://` only if it says so."""
    region: str = ""
    account: str = ""
    """Azure's storage account."""
    cap_bytes: int = 1 << 40
    """What this owner keeps in the bucket; others have caps of their own."""
    ttl_s: float = 7 * _DAY_S
    """Objects older than this are removed, whoever wrote them; 0: never."""
    setting: str = "--object"
    """Where a person has set this, for messages."""
    owner: str = "node"
    """Name of this node's ledger: the same over restarts, another on each node."""
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    """Guaranteed to tenants, as fractions of the cap."""
    min_object_bytes: int = MIN_OBJECT_BYTES
    target_object_bytes: int = TARGET_OBJECT_BYTES
    gather_bytes: int = 256 << 20
    """Memory for blocks that wait until their run is whole."""
    max_known_blocks: int = 1_000_000
    """Blocks remembered to be in the bucket, about 300 bytes each."""
    connections: int = 16
    connect_timeout_s: float = 2.0
    stall_timeout_s: float = 3.0
    """A read without a byte for so long is given up."""
    request_timeout_s: float = 10.0
    retries: int = 3
    lookup_timeout_s: float = 1.0
    absent_for_s: float = 15.0
    """How long an object that was not there is not asked for again."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


def parse_object_url(text: str, *, owner: str, setting: str = "--object") -> ObjectOptions:
    """Raises `ConfigError` that names what is wrong and what would fit."""
    parts = urlsplit(text)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ConfigError(
            f"{setting} {parts.scheme}://...: expected {', '.join(f'{s}://NAME/prefix' for s in SCHEMES)}"
        )
    if parts.username or parts.password:
        raise ConfigError(f"{setting}: credentials do not belong in the URL; set them in the environment")
    options = ObjectOptions(parts.scheme, parts.netloc, parts.path.strip("/"), setting=setting, owner=owner)
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        options = _with(options, name, value)
    return options


def _with(options: ObjectOptions, name: str, value: str) -> ObjectOptions:
    try:
        match name:
            case "cap":
                return replace(options, cap_bytes=parse_bytes(value))
            case "ttl":
                return replace(options, ttl_s=parse_seconds(value))
            case "timeout":
                return replace(options, request_timeout_s=parse_seconds(value))
            case "connections":
                return replace(options, connections=max(1, int(value)))
            case "endpoint" if value.startswith(("http://", "https://")):
                return replace(options, endpoint=value)
            case "endpoint":
                raise ValueError("expected http://... or https://...")
            case "region":
                return replace(options, region=value)
            case "account":
                return replace(options, account=value)
            case "owner":
                return replace(options, owner=value)
    except ValueError as error:
        raise ConfigError(f"{options.setting} ...?{name}={value}: {error}") from None
    known = "cap, ttl, timeout, connections, endpoint, region, account, owner"
    raise ConfigError(f"{options.setting} ...?{name}=: not known here; what can be set is {known}")
