"""What both ways to TensorRT-LLM, its server and its LLM API, say in the same way."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headwater.engines import limits
from headwater.errors import InvalidRequest
from headwater.protocol.request import EngineRequest, StructuredSpec

WRITTEN_FOR = "1.3 and later, before 1.5"
_OLDEST, _TOO_NEW = (1, 3), (1, 5)
DEFAULT_BLOCK_SIZE = 32
"""`tokens_per_block` where nobody said otherwise."""
DEFAULT_PRIORITY = 0.5
_MAX_SEED = 2**63 - 1
_META = re.compile(r"[.^$*+?{}\[\]\\|()/]")


def is_known(version: str) -> bool:
    """Whether this was written for that release."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = tuple(int(number) for number in numbers.groups()) if numbers is not None else ()
    return _OLDEST <= release < _TOO_NEW


def priority_of(priority: int) -> float:
    """Ours has no bounds and grows with urgency; theirs lies between 0 and 1 and does so too."""
    return DEFAULT_PRIORITY * (1 + priority / (1 + abs(priority)))


def adapter_number(folder: str) -> int:
    """By which TensorRT-LLM knows an adapter: the same from every client, and none that others would count up to."""
    return int.from_bytes(hashlib.sha256(folder.encode()).digest()[:4], "big") >> 1 | 1 << 30


def num_resumed(request: EngineRequest) -> int:
    """As `limits` has it, where TensorRT-LLM can go on. Raises `InvalidRequest`."""
    count = limits.num_resumed(request)
    limits.check_resumable(request.sampling, count, "TensorRT-LLM")
    return count


def seed_of(request: EngineRequest, resumed: int) -> int | None:
    """None where the client gave none, or nothing is drawn."""
    params = request.sampling
    return None if params.seed_drawn or params.temperature == 0 else (params.seed + resumed) & _MAX_SEED


def schema_of(spec: StructuredSpec) -> Mapping[str, object]:
    """The JSON schema. Raises `InvalidRequest` for what is no object."""
    try:
        schema = msgspec.json.decode(spec.spec)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{spec.param} is not JSON: {error}", param=spec.param) from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{spec.param} is no object: TensorRT-LLM takes only schemas that are", param=spec.param)
    return schema


ticket_of = msgspec.json.encode
"""Of the `disaggregated_params` that a context-only request ended with."""


def generation_only(ticket: bytes) -> dict[str, Any]:
    """The `disaggregated_params` that go on with what a ticket speaks of. Raises `InvalidRequest`."""
    try:
        params = msgspec.json.decode(ticket, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"this is no ticket of TensorRT-LLM: {error}", param="ticket") from error
    return {name: value for name, value in params.items() if value is not None} | {"request_type": "generation_only"}


def choice_regex(spec: StructuredSpec) -> str:
    """One of some texts, for an engine that knows no choices."""
    choices: Sequence[str] = msgspec.json.decode(spec.spec, type=list[str])
    return "(" + "|".join(_META.sub(r"\\\g<0>", choice) for choice in choices) + ")"
