"""Loads of prompts that are token ids, so that what is cached and what is computed is known to the token."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headwater.bench.load import RequestShape
from headwater.bench.workload import LoadRequest


@dataclass(frozen=True, slots=True)
class TokenShape(RequestShape):
    """Prompts are token ids, written as JSON."""

    def body(self, request: LoadRequest) -> bytes:
        fields = {
            "model": self.model,
            "prompt": msgspec.Raw(request.prompt.encode()),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(fields)


def requests_of(ids: Sequence[Sequence[int]], output_tokens: int) -> list[LoadRequest]:
    return [LoadRequest(msgspec.json.encode(list(prompt)).decode(), output_tokens) for prompt in ids]
