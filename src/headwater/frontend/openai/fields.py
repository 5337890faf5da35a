"""Fields that are known and have no struct member: tolerated values, and what to say about others.

A value in `harmless` changes nothing and is accepted in silence. Any other value asks for something that is not
offered, and is refused rather than ignored.
"""

from dataclasses import dataclass
from typing import Any

_EMPTY: tuple[Any, ...] = (None, False, "", 0)


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    harmless: tuple[Any, ...]
    hint: str

    def tolerates(self, value: Any) -> bool:
        """Compared by type too, as 0, 0.0 and False are equal in Python."""
        if isinstance(value, list | dict):
            return not value or value in self.harmless
        return any(value == allowed and isinstance(value, type(allowed)) for allowed in self.harmless)


IGNORED = frozenset(
    (
        "detokenize",
        "guided_decoding_backend",
        "kv_transfer_params",
        "metadata",
        "prediction",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "verbosity",
    )
)
"""Have no effect on the answer here, whatever their value."""

_ONE_WAY = UnsupportedField(_EMPTY, "leave it out")
_USE_TOOLS = UnsupportedField((None,), "use tools and tool_choice")

CHAT_UNSUPPORTED: dict[str, UnsupportedField] = {
    "best_of": UnsupportedField((None, 1), "use n"),
    "echo": _ONE_WAY,
    "audio": UnsupportedField((None,), "this server answers in text"),
    "modalities": UnsupportedField((None, ["text"]), 'this server answers in text: use ["text"]'),
    "functions": _USE_TOOLS,
    "function_call": _USE_TOOLS,
    "web_search_options": UnsupportedField((None,), "this server does not search the web"),
    "chat_template": UnsupportedField((None, ""), "the template is set by whoever runs the server"),
    "prompt_logprobs": UnsupportedField(_EMPTY, "log probabilities are given for generated tokens"),
    "truncate_prompt_tokens": UnsupportedField((None,), "shorten the prompt before sending it"),
    "use_beam_search": _ONE_WAY,
    "length_penalty": UnsupportedField((None, 1, 1.0), "it belongs to beam search, which is not offered"),
    "early_stopping": _ONE_WAY,
    "bad_words": _ONE_WAY,
    "allowed_token_ids": UnsupportedField((None,), "use logit_bias or structured output"),
    "logits_processors": _ONE_WAY,
    "guided_whitespace_pattern": _ONE_WAY,
    "structural_tag": _ONE_WAY,
}
COMPLETION_UNSUPPORTED: dict[str, UnsupportedField] = {
    **CHAT_UNSUPPORTED,
    "suffix": UnsupportedField((None, ""), "insertion is not offered"),
}
