"""What each frontend has at this worker, so that each can count with the requests of the others.

A sequence counts as its frontend reckoned when it sent it, as before its first token until that was sent, and no
longer once it has ended. Bounded by the open streams.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headwater.protocol.events import FrontendLoad
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.types import TOKEN_ID_BYTES


@dataclass(slots=True)
class _Sums:
    """Of one frontend."""

    num_prefilling: int = 0
    num_decoding: int = 0
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    context_tokens: int = 0


@dataclass(slots=True)
class _Part:
    """Of one sequence."""

    sums: _Sums
    prefill_tokens: int
    prefill_pairs: float
    context_tokens: int
    prefilling: bool = True


class FrontendShares:
    """Sequences by the engine's numbers, frontends by the routing ids of their connections."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        self._sums: dict[bytes, _Sums] = {}

    def opened(self, peer: bytes, handle: int, request: EngineRequest) -> None:
        prompt_tokens = len(request.prompt) // TOKEN_ID_BYTES
        cached = max(0, min(request.expected_cached_tokens, prompt_tokens))
        new = prompt_tokens - cached
        sums = self._sums.get(peer)
        if sums is None:
            sums = self._sums[peer] = _Sums()
        part = self._parts[handle] = _Part(sums, new, new * (cached + (new + 1) / 2), prompt_tokens)
        sums.num_prefilling += 1
        sums.prefill_tokens += part.prefill_tokens
        sums.prefill_pairs += part.prefill_pairs
        sums.context_tokens += part.context_tokens

    def stepped(self, outputs: Sequence[SequenceOutput]) -> None:
        """Outputs, still by the engine's numbers."""
        for output in outputs:
            part = self._parts.get(output.stream)
            if part is None:
                continue
            if part.prefilling and output.token_ids:
                self._prefilled(part)
            if output.finish_reason is not None:
                self.closed((output.stream,))

    def closed(self, handles: Iterable[int]) -> None:
        """Unknown ones are ignored."""
        for handle in handles:
            part = self._parts.pop(handle, None)
            if part is None:
                continue
            if part.prefilling:
                self._prefilled(part)
            part.sums.num_decoding -= 1
            part.sums.context_tokens -= part.context_tokens

    def gone(self, peer: bytes) -> None:
        """A frontend left; its sequences have been closed."""
        self._sums.pop(peer, None)

    def loads(self, name_of: Callable[[bytes], str]) -> list[FrontendLoad]:
        """Of the frontends that have anything here."""
        return [
            FrontendLoad(
                name_of(peer),
                sums.num_prefilling,
                sums.num_decoding,
                sums.prefill_tokens,
                sums.prefill_pairs if sums.num_prefilling else 0.0,
                sums.context_tokens,
            )
            for peer, sums in self._sums.items()
            if sums.num_prefilling or sums.num_decoding
        ]

    def _prefilled(self, part: _Part) -> None:
        part.prefilling = False
        sums = part.sums
        sums.num_prefilling -= 1
        sums.num_decoding += 1
        sums.prefill_tokens -= part.prefill_tokens
        # Sums of floats do not cancel to the bit.
        sums.prefill_pairs = sums.prefill_pairs - part.prefill_pairs if sums.num_prefilling else 0.0
