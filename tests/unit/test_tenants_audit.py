"""The audit log: refusals that anybody can cause do not fill it, and none is forgotten."""

import msgspec

from headwater.clock import VirtualClock
from headwater.frontend.http.base import HttpRequest
from headwater.frontend.tenants.audit import AuditLine, AuditLog


class Lines:
    def __init__(self) -> None:
        self.written: list[AuditLine] = []

    def write(self, line: msgspec.Struct) -> None:
        assert isinstance(line, AuditLine)
        self.written.append(line)


def test_refusals_are_written_a_few_a_second_and_the_rest_is_counted_once() -> None:
    lines, clock = Lines(), VirtualClock(1_000.0)
    log = AuditLog(lines, "fe", clock)
    request = HttpRequest("GET", "/metrics", "", {}, b"", "10.0.0.9", request_id="r")
    for _ in range(500):
        log.refused(request, "invalid_api_key")
    assert [line.not_shown for line in lines.written] == [0] * 20
    log.admin(request)
    assert lines.written[-1].not_shown == 480, "what is not a refusal is always written"
    clock.advance(1.0)
    log.over_quota(request, "monthly_tokens")
    assert (lines.written[-1].event, lines.written[-1].code, lines.written[-1].not_shown) == (
        "quota",
        "monthly_tokens",
        0,
    )
    assert len(lines.written) == 22
