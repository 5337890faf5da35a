"""Routing hints of a request: headers first, then `nvext`, then fields of the body.

| hint | from |
|---|---|
| session | `x-session-id`, `x-dynamo-session-id`, `x-claude-code-session-id`; `prompt_cache_key`; `user` |
| worker | `x-worker-instance-id`, `x-dynamo-worker-instance-id`; `decode_worker_id`, `backend_instance_id` in `nvext` |
| priority | `x-request-priority`, `x-dynamo-request-priority`; see `sampling.scheduling_priority` |
| tenant | of the key, or `x-tenant-id` from whoever may name tenants |
| rest | `nvext.agent_hints`: `osl`, `latency_sensitivity`, `prefix_id`, `iat` |
"""

from collections.abc import Mapping
from hashlib import blake2b

from headwater.errors import InvalidRequest
from headwater.frontend.hints import RoutingHints
from headwater.frontend.openai.parse import short_json
from headwater.frontend.openai.schema import AgentHints, GenerationFields, NvExt

_SESSION_HEADERS = (b"x-session-id", b"x-dynamo-session-id", b"x-claude-code-session-id")
_WORKER_HEADERS = (b"x-worker-instance-id", b"x-dynamo-worker-instance-id")
_PRIORITY_HEADERS = (b"x-request-priority", b"x-dynamo-request-priority")
_MAX_NAME_CHARS = 256
_MOST_SENSITIVE = 10.0
_MAX_PRIORITY = 2**31 - 1

Headers = Mapping[bytes, bytes]

_NO_NVEXT = NvExt()
_NO_HINTS = AgentHints()


def routing_hints(fields: GenerationFields, headers: Headers, tenant: str, salt: str) -> RoutingHints:
    """Raises `InvalidRequest`."""
    nvext = fields.nvext or _NO_NVEXT
    hints = nvext.agent_hints or _NO_HINTS
    worker_id, worker_param = _worker(nvext, headers)
    return RoutingHints(
        tenant=tenant,
        salt_tenant=_salt_tenant(salt) if salt and not tenant else "",
        session_id=_header(headers, _SESSION_HEADERS) or _short(fields.prompt_cache_key or fields.user),
        session_keep_s=2e-3 * hints.iat if hints.iat is not None else 0.0,
        expected_output_tokens=float(hints.osl or 0),
        latency_sensitivity=_sensitivity(hints.latency_sensitivity),
        prefix_group=_short(hints.prefix_id),
        worker_id=worker_id,
        worker_param=worker_param,
    )


def header_priority(headers: Headers) -> int | None:
    """Higher is served first. Raises `InvalidRequest`."""
    name = next((name for name in _PRIORITY_HEADERS if headers.get(name)), None)
    given = None if name is None else _header(headers, (name,))
    if name is None or given is None:
        return None
    sign = given[:1] == "-"
    digits = given[sign:]
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and int(digits) <= _MAX_PRIORITY):
        param = name.decode()
        raise InvalidRequest(
            f"{param} is {short_json(given)}, expected an integer from -{_MAX_PRIORITY:,} to {_MAX_PRIORITY:,}",
            param=param,
        )
    return -int(digits) if sign else int(digits)


def _worker(nvext: NvExt, headers: Headers) -> tuple[str | None, str | None]:
    """Its id, and what names it."""
    for header in _WORKER_HEADERS:
        given = _header(headers, (header,))
        if given is not None:
            return given, header.decode()
    fields = {name: getattr(nvext, name) for name in ("decode_worker_id", "backend_instance_id")}
    named = {str(worker_id): f"nvext.{name}" for name, worker_id in fields.items() if worker_id is not None}
    if len(named) > 1:
        raise InvalidRequest(
            f"nvext names two workers to decode, {' and '.join(sorted(named))}", param="nvext.decode_worker_id"
        )
    return next(iter(named.items()), (None, None))


def _sensitivity(given: float | None) -> float:
    return 1.0 if given is None else min(_MOST_SENSITIVE, max(1.0, given))


def _header(headers: Headers, names: tuple[bytes, ...]) -> str | None:
    for name in names:
        value = headers.get(name)
        if value:
            return _short(value.decode("utf-8", "replace").strip())
    return None


def _short(name: str | None) -> str | None:
    """Names are the client's to choose; long ones are kept by their hash."""
    if not name:
        return None
    return name if len(name) <= _MAX_NAME_CHARS else blake2b(name.encode(), digest_size=16).hexdigest()


def _salt_tenant(salt: str) -> str:
    """Not the salt itself, which guards what is cached under it."""
    return f"salt-{blake2b(salt.encode(), digest_size=4).hexdigest()}"
