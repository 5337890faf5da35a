"""The log of served requests: what a replay needs, and nothing that could be read as text.

A file is JSON lines: first a `LogHeader`, then a `LoggedRequest` for every sequence that has ended, in that order.
Blocks, sessions and tenants are named by hashes under a key that is kept beside the log, so that equal things can be
told to be equal by whoever has the log, and a guess at a prompt can be checked only with the key as well.
Readers ignore fields they do not know and refuse a format or version they do not know.
"""

from typing import Literal

import msgspec

FORMAT = "headwater-requests"
VERSION = 1
KEY_BYTES = 8
"""Per block."""

Outcome = Literal["finished", "aborted", "failed", "refused"]


class LogHeader(msgspec.Struct, frozen=True):
    format: str
    version: int


class LoggedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence."""

    at: float
    """Epoch seconds of its arrival."""
    model: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    block_size: int
    blocks: str
    """Base64 of 8 bytes for each full block of the prompt; each names the whole prefix up to its end."""
    outcome: Outcome = "finished"
    session: str = ""
    tenant: str = ""
    priority: int = 0
    worker: str = ""
    cached_tokens: int = 0
    ttft_ms: float | None = None
    e2e_ms: float = 0.0
