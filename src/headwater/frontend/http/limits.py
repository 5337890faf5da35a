"""How much a client may ask of the edge before it is turned away."""

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Every limit is per connection unless its comment says otherwise."""

    max_connections: int = 10_000
    """Per server; one more is answered 503 and closed."""
    max_target_bytes: int = 8 * KIB
    max_head_bytes: int = 32 * KIB
    max_headers: int = 128
    max_body_bytes: int = 16 * MIB
    max_partial_bodies_bytes: int = 512 * MIB
    """Per server: bodies that are still arriving, all together."""
    max_pipelined: int = 16
    """Requests that wait for their turn; what comes after them is not answered."""
    stream_buffer_bytes: int = MIB
    """Unread bytes of one streamed answer before it is cut off."""
    header_timeout_s: float = 10.0
    """From the first byte of a head (or from the connection) to its end."""
    body_timeout_s: float = 20.0
    """Each stretch of this length must bring the body forward by `min_body_bytes_per_s`."""
    min_body_bytes_per_s: int = 256
    keepalive_timeout_s: float = 75.0
    write_timeout_s: float = 30.0
    """Time in which a client that owes reading must take something."""
    linger_timeout_s: float = 2.0
    """After a refusal: how long input is thrown away so that the client gets to read the answer."""
    drain_idle_s: float = 1.0
    """When the server stops: how long an idle connection is kept, for a request that is on its way."""
