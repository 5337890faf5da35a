"""The part of understanding a request that chat and plain completions share."""

from dataclasses import dataclass

from headwater.clock import Clock
from headwater.errors import InvalidRequest
from headwater.frontend.openai.chat_format import Head
from headwater.frontend.openai.model import ServedModel
from headwater.frontend.openai.schema import GenerationFields, StreamOptions


def stream_options(fields: GenerationFields) -> StreamOptions:
    """Raises `InvalidRequest` for options without a stream."""
    if fields.stream_options is None:
        return _NO_OPTIONS
    if not fields.stream:
        raise InvalidRequest("stream_options is given and stream is not true", param="stream_options")
    return fields.stream_options


_NO_OPTIONS = StreamOptions()


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks and when: what an answer repeats."""

    request_id: str
    clock: Clock

    def head(self, stem: str, asked_model: str, model: ServedModel) -> Head:
        """The model is called as the client called it."""
        return Head(
            f"{stem}-{self.request_id}", int(self.clock.epoch()), asked_model, f"fp_{model.card.fingerprint[:12]}"
        )
