"""The part of understanding a request that chat and plain completions share."""

from collections.abc import Mapping

import msgspec

from headwater.clock import Clock
from headwater.errors import InvalidRequest
from headwater.frontend.hints import RoutingHints
from headwater.frontend.openai.chat_format import Head
from headwater.frontend.openai.hints import header_priority, routing_hints
from headwater.frontend.openai.model import ServedModel
from headwater.frontend.openai.sampling import cache_salt, scheduling_priority
from headwater.frontend.openai.schema import GenerationFields, StreamOptions
from headwater.frontend.tenants.principal import NOBODY, Principal


def stream_options(fields: GenerationFields) -> StreamOptions:
    """Raises `InvalidRequest` for options without a stream."""
    if fields.stream_options is None:
        return _NO_OPTIONS
    if not fields.stream:
        raise InvalidRequest("stream_options is given and stream is not true", param="stream_options")
    return fields.stream_options


_NO_OPTIONS = StreamOptions()


class Asker(msgspec.Struct, frozen=True):
    """Who asks and when: what an answer repeats, and what the head of the request adds to its body."""

    request_id: str
    clock: Clock
    headers: Mapping[bytes, bytes] = msgspec.field(default_factory=dict[bytes, bytes])
    principal: Principal = NOBODY

    def salt(self, fields: GenerationFields) -> str:
        """Requests share cached prefixes only with the same one."""
        return self.principal.salt(cache_salt(fields))

    def priority(self, fields: GenerationFields) -> int:
        """Higher is served first. Raises `InvalidRequest`."""
        given = header_priority(self.headers)
        return scheduling_priority(fields) if given is None else given

    def hints(self, fields: GenerationFields) -> RoutingHints:
        """Raises `InvalidRequest`."""
        return routing_hints(fields, self.headers, self.principal.tenant, cache_salt(fields))

    def head(self, stem: str, asked_model: str, model: ServedModel) -> Head:
        """The model is called as the client called it."""
        return Head(
            f"{stem}-{self.request_id}", int(self.clock.epoch()), asked_model, f"fp_{model.card.fingerprint[:12]}"
        )
