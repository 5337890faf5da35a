"""The audit log: who was let in where it matters, who was refused, and when keys changed. No secrets, no texts.

Refusals can be caused by anybody, so they are written a few a second; the rest is counted into the next line.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal, Protocol

import msgspec

from headwater.clock import Clock
from headwater.frontend.http.base import HttpRequest
from headwater.frontend.tenants.keyring import Keyring

AuditEvent = Literal["started", "stopped", "admin", "refused", "quota", "keyring"]

_REFUSALS_PER_S = 20
_MAX_PATH_CHARS = 200


class AuditLine(msgspec.Struct, frozen=True, omit_defaults=True):
    at: str
    event: AuditEvent
    frontend: str
    key_id: str = ""
    tenant: str = ""
    client: str = ""
    method: str = ""
    path: str = ""
    request_id: str = ""
    code: str = ""
    """Of the error that refused it, or the name of the quota."""
    detail: str = ""
    not_shown: int = 0
    """Refusals since the last line that were left out."""


class Lines(Protocol):
    def write(self, line: msgspec.Struct) -> None: ...


class AuditLog:
    def __init__(self, lines: Lines | None, frontend_id: str, clock: Clock) -> None:
        self._lines = lines
        self._frontend_id = frontend_id
        self._clock = clock
        self._second = 0
        self._num_shown = 0
        self._not_shown = 0

    def started(self, keys: str) -> None:
        self._write("started", detail=keys)

    def stopped(self) -> None:
        self._write("stopped")

    def admin(self, request: HttpRequest) -> None:
        """Something beyond inference was asked for, and allowed."""
        self._write("admin", **_of(request))

    def refused(self, request: HttpRequest, code: str) -> None:
        self._sparing(lambda: self._write("refused", **_of(request), code=code))

    def over_quota(self, request: HttpRequest, quota: str) -> None:
        self._sparing(lambda: self._write("quota", **_of(request), code=quota))

    def keyring(self, before: Keyring, after: Keyring) -> None:
        """What changed, by ids."""
        changes = {
            "added": sorted(after.keys.keys() - before.keys.keys()),
            "removed": sorted(before.keys.keys() - after.keys.keys()),
            "changed": sorted(k for k in before.keys.keys() & after.keys.keys() if before.keys[k] != after.keys[k]),
            "tenants": sorted(
                name
                for name in before.tenants.keys() | after.tenants.keys()
                if before.tenants.get(name) != after.tenants.get(name)
            ),
        }
        self._write("keyring", detail="; ".join(f"{what}: {', '.join(ids)}" for what, ids in changes.items() if ids))

    def _sparing(self, write: Callable[[], None]) -> None:
        second = int(self._clock.now())
        if second != self._second:
            self._second, self._num_shown = second, 0
        if self._num_shown >= _REFUSALS_PER_S:
            self._not_shown += 1
            return
        self._num_shown += 1
        write()

    def _write(self, event: AuditEvent, **fields: str) -> None:
        if self._lines is not None:
            at = datetime.fromtimestamp(self._clock.epoch(), UTC).isoformat(timespec="milliseconds")
            self._lines.write(AuditLine(at, event, self._frontend_id, **fields, not_shown=self._not_shown))
            self._not_shown = 0


def _of(request: HttpRequest) -> dict[str, str]:
    principal = request.principal
    return {
        "key_id": principal.key_id,
        "tenant": principal.tenant,
        "client": request.client,
        "method": request.method,
        "path": request.path[:_MAX_PATH_CHARS],
        "request_id": request.request_id,
    }
