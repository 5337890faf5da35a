"""What a step of vLLM computed, as far as it says: numbers of tokens exactly, contexts by our own count."""

from collections.abc import Mapping
from typing import Any

from headwater.engines.external import OpenStream
from headwater.protocol.events import StepTiming


class PrefillProgress:
    """How far the prompts have come that have no token yet; vLLM serves them in the order of arrival."""

    def __init__(self) -> None:
        self._done: dict[int, int] = {}

    def timing(self, details: Any, streams: Mapping[int, OpenStream]) -> StepTiming:
        """`details`: vLLM's account of one iteration; `streams`: as they were before it."""
        left = int(details.num_ctx_tokens)
        pairs = decode_context = 0
        for number, stream in streams.items():
            if stream.num_generated:
                decode_context += stream.num_prompt_tokens + stream.num_generated
            elif left:
                start = self._done.get(number, stream.request.expected_cached_tokens)
                part = min(left, max(0, stream.num_prompt_tokens - start))
                pairs += part * start + part * (part + 1) // 2
                self._done[number] = start + part
                left -= part
        if not details.num_ctx_tokens:
            self._done.clear()
        return StepTiming(
            int(details.num_ctx_tokens),
            pairs,
            int(details.num_generation_requests),
            decode_context,
            float(details.elapsed_ms),
        )
