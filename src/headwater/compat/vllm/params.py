"""vLLM's `SamplingParams` and what becomes of each field: most are fields of our API by the same name.

A field that asks for what is not offered here is refused, never ignored; its default changes nothing.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headwater.errors import InvalidRequest


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """One of the first five."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def body(self) -> dict[str, Any]:
        given = {name: value for name, value in asdict(self).items() if value not in (None, False)}
        for name in _STRUCTURED_NOT_OFFERED & given.keys():
            raise InvalidRequest(f"structured_outputs.{name} is not offered", param=f"structured_outputs.{name}")
        return given


_STRUCTURED_NOT_OFFERED = frozenset(
    ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "structural_tag")
)


@dataclass(kw_only=True)
class SamplingParams:
    """As in vLLM, names and defaults."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = field(default=None)

    def body(self, *, chat: bool) -> dict[str, Any]:
        """The fields of a request. Raises `InvalidRequest`."""
        for item in fields(self):
            if item.name in NOT_OFFERED and getattr(self, item.name) != item.default:
                raise InvalidRequest(f"{item.name} is not offered: leave it out", param=item.name)
        body = {name: value for name in SAME_NAME if (value := getattr(self, name)) is not None}
        if self.stop == []:
            del body["stop"]
        if self.structured_outputs is not None:
            body["structured_outputs"] = self.structured_outputs.body()
        if self.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs} if chat else {"logprobs": self.logprobs}
        return body


SAME_NAME = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
NOT_OFFERED = (
    "prompt_logprobs",
    "detokenize",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "extra_args",
)
