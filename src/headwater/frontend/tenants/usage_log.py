"""The account of usage: one line per request that reached a worker, for whoever writes bills. No text, no secrets."""

import msgspec


class UsageLine(msgspec.Struct, frozen=True):
    at: float
    """Epoch seconds when it ended."""
    request_id: str
    tenant: str
    key_id: str
    model: str
    worker: str
    route: str
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt."""
    output_tokens: int
    accelerator_ms: float
    """Worker time, by the learned time model: its prefill, and its share of decode steps."""
    status: int
