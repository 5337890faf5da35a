"""What a step of a foreign engine computed, as far as it says: numbers of tokens exactly, contexts by our own count."""

from collections.abc import Mapping

from headwater.engines.external import OpenStream
from headwater.protocol.events import StepTiming


class PrefillProgress:
    """How far the prompts have come that have no token yet, which are served in the order of arrival."""

    def __init__(self) -> None:
        self._done: dict[int, int] = {}

    def timing(
        self, num_prefill_tokens: int, num_decode: int, duration_ms: float, streams: Mapping[int, OpenStream]
    ) -> StepTiming:
        """`streams`: as they were before the step."""
        left = num_prefill_tokens
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
        if not num_prefill_tokens:
            self._done.clear()
        elif len(self._done) > len(streams):  # an engine that is never without a prompt
            self._done = {number: done for number, done in self._done.items() if number in streams}
        return StepTiming(num_prefill_tokens, pairs, num_decode, decode_context, duration_ms)
