"""Ids and closed sets used everywhere. Imports nothing of ours."""

from typing import Literal, NewType

RequestId = NewType("RequestId", str)
"""What the client sees in `x-request-id`; the same in the logs of every role."""

WorkerId = NewType("WorkerId", str)
"""Unique for the life of one worker process; a restarted worker has a new one."""

FrontendId = NewType("FrontendId", str)

BlockId = NewType("BlockId", bytes)
"""16 bytes: keyed hash of (parent, tokens, extra keys). See `headwater.kv.identity`."""

Role = Literal["both", "prefill", "decode"]
Tier = Literal["device", "host", "disk", "peer", "object"]
FinishReason = Literal["stop", "length", "abort", "error"]

BLOCK_ID_BYTES = 16
TOKEN_ID_BYTES = 4
"""Token ids travel as little-endian unsigned 32-bit integers."""
