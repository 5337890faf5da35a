"""The gate before all routes: `Authorization: Bearer KEY` (or `x-api-key: KEY`) to a principal with its scopes.

Keys come from the keyring, and from `--api-key` in plain: those have a tenant each (`key-1`, ...) and every scope.
Where there are no keys at all, whoever comes is let in: on an address of this host alone with every scope, elsewhere
with `inference` only, so that nothing about the cluster is on a public port without a key.

A key is looked up by a keyed hash of its digest under a secret of this process, then compared in constant time: how
long that takes tells nothing. A page of another origin is refused, whether its name was made to point here (DNS
rebinding) or its visitor's browser sends a form here: without a key, what is more than inference wants a Host, and an
Origin if there is one, that names this host.
"""

import hmac
import ipaddress
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b

from headwater.clock import Clock
from headwater.errors import Forbidden, Unauthorized
from headwater.frontend.http.base import HttpRequest
from headwater.frontend.tenants.keyring import SCOPES, Keyring, Scope, TenantSpec, key_digest
from headwater.frontend.tenants.principal import Principal

TENANT_HEADER = b"x-tenant-id"
_MAX_TENANT_CHARS = 256
_MAX_KEY_BYTES = 512
_NO_TENANT = TenantSpec()
_OPERATOR = Principal(frozenset(("metrics", "admin")), "operator")


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    principal: Principal
    expires: datetime | None = None


class Gate:
    def __init__(
        self,
        plain_keys: Sequence[str],
        clock: Clock,
        *,
        keyring: Keyring | None = None,
        public: bool = False,
        trust_tenant_header: bool = False,
        operator_key: str | None = None,
    ) -> None:
        """`public`: others than this host can reach the port. `operator_key`: opens metrics and admin routes, and
        whatever needs no key."""
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._trusting = trust_tenant_header
        self._public = public
        self._plain = {self._blind(entry.digest): entry for entry in map(self._plain_entry, *_numbered(plain_keys))}
        self._tenants: Mapping[str, TenantSpec] = {}
        self._entries = self._plain
        self._open = not plain_keys and keyring is None
        self._anonymous = Principal(self._own_scopes("inference") if public else self._own_scopes(*SCOPES))
        if operator_key is not None:
            scopes = _OPERATOR.scopes | (self._anonymous.scopes if self._open else frozenset())
            operator = _Entry(key_digest(operator_key.encode()), replace(_OPERATOR, scopes=scopes))
            self._plain[self._blind(operator.digest)] = operator
        if keyring is not None:
            self.load(keyring)

    def load(self, keyring: Keyring) -> None:
        """Take another keyring; from now on it alone counts, beside the plain keys."""
        listed = {
            self._blind(bytes.fromhex(key.sha256)): _Entry(
                bytes.fromhex(key.sha256),
                _principal(key_id, key.tenant, frozenset(key.scopes), keyring.tenants[key.tenant]),
                key.expires,
            )
            for key_id, key in keyring.keys.items()
        }
        self._tenants = keyring.tenants
        self._entries = {**self._plain, **listed}

    def tenant(self, name: str) -> TenantSpec:
        return self._tenants.get(name, _NO_TENANT)

    def tenant_names(self) -> Collection[str]:
        return self._tenants.keys()

    def check(self, request: HttpRequest, scope: Scope) -> Principal:
        """Raises `Unauthorized` or `Forbidden`."""
        principal = self._holder(request)
        if principal is None:
            principal = self._whoever(request, scope)
        if scope not in principal.scopes:
            if not principal.key_id:
                raise Unauthorized(f"this needs a key with the scope {scope}, as the port is open to other hosts")
            raise Forbidden(f"key {principal.key_id} lacks the scope {scope}; it has {', '.join(principal.scopes)}")
        return self._delegated(request, principal)

    def _whoever(self, request: HttpRequest, scope: Scope) -> Principal:
        if scope != "inference" and not self._public:
            if not _names_this_host(request.headers.get(b"host", b"")):
                raise Forbidden("without a key this is for clients of this host who call it by address or as localhost")
            if not _is_page_of_this_host(request.headers.get(b"origin", b"")):
                raise Forbidden("without a key this is not for pages of other origins")
        return self._anonymous

    def _holder(self, request: HttpRequest) -> Principal | None:
        """Whose key it brings; None for whoever needs none."""
        digest = key_digest(_given(request.headers))
        entry = self._entries.get(self._blind(digest))
        if entry is None or not hmac.compare_digest(entry.digest, digest):
            if self._open:
                return None  # clients send something, because their libraries want them to
            raise _refusal(request.headers)
        if entry.expires is not None and datetime.fromtimestamp(self._clock.epoch(), UTC) >= entry.expires:
            raise Unauthorized(f"key {entry.principal.key_id} is no longer accepted: it expired or was revoked")
        return entry.principal

    def _delegated(self, request: HttpRequest, principal: Principal) -> Principal:
        """Whoever a gateway asks for."""
        given = request.headers.get(TENANT_HEADER)
        if not given or "delegate" not in principal.scopes:
            return principal
        name = _short(given.decode("utf-8", "replace").strip())
        spec = self._tenants.get(name, _NO_TENANT)
        return replace(principal, tenant=name, kv_group=spec.kv_group or name, kv_share=spec.kv_share)

    def _plain_entry(self, number: int, key: str) -> _Entry:
        name = f"key-{number}"
        return _Entry(key_digest(key.encode()), _principal(name, name, self._own_scopes(*SCOPES), _NO_TENANT))

    def _own_scopes(self, *scopes: Scope) -> frozenset[Scope]:
        """Of those who are not in a keyring: a setting says whether they may name tenants."""
        return frozenset((*(s for s in scopes if s != "delegate"), *(("delegate",) if self._trusting else ())))

    def _blind(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._secret, digest_size=16).digest()


def _numbered(keys: Sequence[str]) -> tuple[range, Sequence[str]]:
    return range(1, len(keys) + 1), keys


def _principal(key_id: str, tenant: str, scopes: frozenset[Scope], spec: TenantSpec) -> Principal:
    return Principal(scopes, key_id, tenant, spec.kv_group or tenant, spec.kv_share)


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    """The key that a request brings; empty when there is none, or something that is too long to be one."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    key = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
    return key if len(key) <= _MAX_KEY_BYTES else b""


def _refusal(headers: Mapping[bytes, bytes]) -> Unauthorized:
    if b"authorization" in headers or b"x-api-key" in headers:
        return Unauthorized("the API key is not one of those that are accepted")
    return Unauthorized("no API key was given; send it as `Authorization: Bearer KEY`")


def _names_this_host(host: bytes) -> bool:
    name = host.decode("ascii", "replace").lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_page_of_this_host(origin: bytes) -> bool:
    """`http://localhost:3000`. Browsers send it with whatever may change something; other clients send none."""
    scheme, _, host = origin.partition(b"://")
    return not origin or (scheme in (b"http", b"https") and bool(host) and _names_this_host(host))


def _short(name: str) -> str:
    """Names are the gateway's to choose; long ones are kept by their hash."""
    return name if len(name) <= _MAX_TENANT_CHARS else blake2b(name.encode(), digest_size=16).hexdigest()
