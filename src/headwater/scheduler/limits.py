"""What bounds a scheduler, and which requests can never be served within it."""

from array import array
from dataclasses import dataclass, field

from headwater.errors import ConfigError, ContextTooLong, InvalidRequest
from headwater.protocol.request import EngineRequest
from headwater.types import BLOCK_ID_BYTES, TOKEN_ID_BYTES

_MAX_NAMESPACE_BYTES = 64
_ALL_TOKEN_IDS = 1 << 8 * TOKEN_ID_BYTES


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes of one engine."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int = 1024
    prefix_caching: bool = True
    eos_token_ids: frozenset[int] = field(default_factory=frozenset[int])
    namespace: bytes = b""
    """Key of the block identity for requests that bring none."""

    def __post_init__(self) -> None:
        sizes = (self.num_blocks, self.block_size, self.max_model_len, self.max_num_seqs)
        if min(sizes) < 1:
            raise ConfigError(f"KV blocks, block size, context length and sequences must be positive, not {sizes}")
        least = self.max_num_seqs + self.block_size
        if self.max_num_batched_tokens < least:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} leaves no room to prefill beside "
                f"{self.max_num_seqs} decoding sequences (max_num_seqs): at least {least}, "
                f"one block of {self.block_size} more"
            )

    @property
    def capacity_tokens(self) -> int:
        """Tokens the whole pool holds."""
        return self.num_blocks * self.block_size

    def check(self, request: EngineRequest) -> "array[int]":
        """The request's tokens (prompt and resumed). Raises `RequestError` when it can never be served here."""
        for name, value in (("prompt", request.prompt), ("resumed_tokens", request.resumed_tokens)):
            if len(value) % TOKEN_ID_BYTES:
                raise InvalidRequest(
                    f"{name} has {len(value)} bytes, expected {TOKEN_ID_BYTES} for each token id", param=name
                )
        num_prompt = len(request.prompt) // TOKEN_ID_BYTES
        self._check_length(num_prompt)
        self._check_sampling(request)
        self._check_identity(request, num_prompt)
        tokens = array("I", request.prompt + request.resumed_tokens)
        if self.vocab_size < _ALL_TOKEN_IDS and (largest := max(tokens)) >= self.vocab_size:
            raise InvalidRequest(
                f"the prompt has the token id {largest}, expected one from 0 to {self.vocab_size - 1}", param="prompt"
            )
        return tokens

    def _check_length(self, num_prompt: int) -> None:
        if num_prompt == 0:
            raise InvalidRequest("the prompt has no tokens, expected at least one", param="prompt")
        if num_prompt + 1 > self.max_model_len:
            raise ContextTooLong(
                f"the prompt has {num_prompt} tokens, the model's context is {self.max_model_len}: "
                f"at most {self.max_model_len - 1} prompt tokens leave room for an answer",
                param="prompt",
            )
        if num_prompt + 1 > self.capacity_tokens:
            raise ContextTooLong(
                f"the prompt has {num_prompt} tokens, the KV cache of the worker holds {self.capacity_tokens} "
                f"({self.num_blocks} blocks of {self.block_size}): at most {self.capacity_tokens - 1} prompt tokens "
                "leave room for an answer",
                param="prompt",
            )

    def _check_sampling(self, request: EngineRequest) -> None:
        sampling = request.sampling
        if sampling.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {sampling.max_tokens}, expected at least 1", param="max_tokens")
        if not 0 <= sampling.min_tokens <= sampling.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}, expected from 0 to max_tokens, {sampling.max_tokens}",
                param="min_tokens",
            )

    def _check_identity(self, request: EngineRequest, num_prompt: int) -> None:
        if len(request.namespace) > _MAX_NAMESPACE_BYTES:
            raise InvalidRequest(
                f"namespace has {len(request.namespace)} bytes, at most {_MAX_NAMESPACE_BYTES} fit", param="namespace"
            )
        expected = num_prompt // self.block_size * BLOCK_ID_BYTES
        if request.block_ids and len(request.block_ids) != expected:
            raise InvalidRequest(
                f"block_ids has {len(request.block_ids)} bytes for {num_prompt} prompt tokens in blocks of "
                f"{self.block_size}, expected {expected} or none",
                param="block_ids",
            )
