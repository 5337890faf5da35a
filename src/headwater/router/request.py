"""What a router is asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class RouteRequest:
    """What a policy may know of a request: one prompt, `num_sequences` answers to it."""

    fingerprint: str
    """Of the model: workers with an equal one are exchangeable."""
    num_prompt_tokens: int
    max_tokens: int
    """Per sequence."""
    num_sequences: int = 1
    block_ids: bytes = b""
    """Ids of the prompt's full blocks, 16 bytes each."""
    block_size: int = 16
    expected_output_tokens: float = 0.0
    """If the client said so; 0: the router fills in the running mean of the model."""
    session_id: str | None = None
    session_keep_s: float = 0.0
    """When the session's next turn is expected, if the client said so."""
    now: float = 0.0
    """Seconds on any clock that does not run backwards."""
    prefix_group: str | None = None
    """A name the client gave to all requests that begin alike."""
    pinned_to: str | None = None
    """The only worker it may go to."""
    pinned_by: str | None = None
    """What the client named it with, for messages."""
    latency_sensitivity: float = 1.0
    """Above 1: the first token matters so many times more than the operator's settings say."""
    keys: Sequence[int] = ()
    """Filled in by the router: index keys of `block_ids`."""
    home: str | None = None
    """Filled in by the router: the worker that is to have it when nothing else decides."""
    churn: float = 0.0
    """Filled in by the router: blocks displaced per block stored, lately."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Filled in by the router: prompt tokens that a worker need not compute, by worker id."""
