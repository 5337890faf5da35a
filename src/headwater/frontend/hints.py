"""What a client, or a gateway before us, says about how a request is to be routed."""

import msgspec


class RoutingHints(msgspec.Struct, frozen=True):
    tenant: str = ""
    """Said by a gateway that is trusted to know."""
    salt_tenant: str = ""
    """Drawn from the cache salt, for want of anything better."""
    session_id: str | None = None
    session_keep_s: float = 0.0
    """When the session's next turn is expected."""
    expected_output_tokens: float = 0.0
    latency_sensitivity: float = 1.0
    prefix_group: str | None = None
    worker_id: str | None = None
    """The only worker that may have it."""
    worker_param: str | None = None
    """The header or field that names it."""


NO_HINTS = RoutingHints()
