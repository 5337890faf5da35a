"""Requests that pass as they came: what the router sees of them, and what the server is sent.

The prompt of such a request is its text, four bytes a token: near enough to a token's length to weigh requests, and
chained into block ids like any other prompt, so that those that begin alike go to the same server.
"""

import hashlib
from typing import NamedTuple

import msgspec

from headwater.config.schema import EngineConfig
from headwater.engines.attached.dialects.base import Description
from headwater.engines.card import served_names
from headwater.errors import InvalidRequest
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest
from headwater.types import TOKEN_ID_BYTES

_MAX_MODEL_LEN = 131_072
_BLOCK_SIZE = 16
_OURS = ("nvext",)
"""Members that are for us and that strict servers refuse."""


def relay_card(config: EngineConfig, found: Description, dialect: str) -> ModelCard:
    names = list(config.served_model_name) or [found.model, *found.aliases, *found.adapters]
    identity = f"relay {dialect} {found.model}"
    return ModelCard(
        name=served_names(config, found.model)[0],
        served_names=names,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        architecture=dialect,
        dtype="unknown",
        kv_layout="relay",
        max_model_len=found.max_model_len or config.max_model_len or _MAX_MODEL_LEN,
        block_size=_BLOCK_SIZE,
        vocab_size=1 << 8 * TOKEN_ID_BYTES,
        created=found.created,
        relayed=True,
    )


class Relayed(NamedTuple):
    """What the server is sent."""

    path: str
    body: bytes
    streamed: bool
    """Whether the answer is to come piece by piece."""


def relayed_request(request: EngineRequest, known: tuple[str, ...], model: str) -> Relayed:
    """With the server's name for its model where the client's is not one of those it knows."""
    if request.relay is None:
        raise InvalidRequest("this server takes only requests as clients send them")
    try:
        members = msgspec.json.decode(request.relay.body, type=dict[str, msgspec.Raw])
        asked = msgspec.json.decode(members["model"], type=str)
    except (msgspec.MsgspecError, KeyError) as error:
        raise InvalidRequest(f"the body is no request: {error}") from error
    streamed = bytes(members.get("stream", b"")) == b"true"
    if asked in known and not any(name in members for name in _OURS):
        return Relayed(request.relay.path, request.relay.body, streamed)
    kept = {name: value for name, value in members.items() if name not in _OURS}
    if asked not in known:
        kept["model"] = msgspec.Raw(msgspec.json.encode(model))
    return Relayed(request.relay.path, msgspec.json.encode(kept), streamed)
