"""One model as the frontend serves it: tokenizer, template, token tables, limits."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headwater.clock import Clock, RealClock
from headwater.errors import InvalidRequest, ModelError
from headwater.frontend.postprocess.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from headwater.frontend.postprocess.token_table import TokenTable
from headwater.frontend.postprocess.tools import ToolFormat, detect_tool_format
from headwater.frontend.preprocess.prompt import PromptLimits
from headwater.frontend.preprocess.template import ChatTemplate
from headwater.frontend.preprocess.tokenizer import Backend, Tokenizer, load_tokenizer, unpack_ids
from headwater.frontend.preprocess.tokenizer_file import TokenizerFile, read_tokenizer_file
from headwater.kv.identity import namespace
from headwater.protocol.cluster import ModelCard
from headwater.types import TOKEN_ID_BYTES

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_CONTEXT_TOKENS = 6
"""Prompt tokens that a decoder with an eye for neighbours gets to see."""


class ModelLookup(Protocol):
    """The models that can be asked for now."""

    @property
    def relays(self) -> bool:
        """Whether any of them is relayed."""
        ...

    def get(self, name: str) -> "ServedModel | RelayedModel":
        """By any of its served names. Raises `ModelNotFound`, or `NoWorkers` for what cannot be served now."""
        ...

    def cards(self) -> Sequence[ModelCard]: ...


class RelayedModel:
    """A model whose requests and answers pass as they are."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card


def served(models: ModelLookup, name: str) -> "ServedModel":
    """A model with a tokenizer here. Raises `InvalidRequest` for a relayed one, and what `get` raises."""
    model = models.get(name)
    if isinstance(model, RelayedModel):
        raise InvalidRequest(f"{name} is relayed to a server of its own, which does not offer this", param="model")
    return model


class ServedModel:
    """Immutable; shared by all requests and threads."""

    def __init__(
        self, card: ModelCard, file: TokenizerFile, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.template = template
        self.tool_format: ToolFormat | None = detect_tool_format(template.source) if template is not None else None
        self.table = None if file.decoder == "other" else TokenTable(file, card.vocab_size)
        self.vocab_size = card.vocab_size
        self.limits = PromptLimits(
            card.max_model_len,
            file.longest_token_chars,
            card.block_size,
            card.vocab_size if len(file.tokens) > card.vocab_size else None,
        )
        self._tokens = file.tokens
        self._unsalted = namespace(card.fingerprint, card.kv_layout)

    def adapter(self, name: str) -> str | None:
        """The adapter that a served name stands for; None for the model itself."""
        return name if name in self.card.adapters else None

    def namespace(self, salt: str, name: str = "") -> bytes:
        """Key of the block ids of requests with this salt, under a served name."""
        adapter = self.adapter(name) or ""
        if not salt and not adapter:
            return self._unsalted
        return namespace(self.card.fingerprint, self.card.kv_layout, adapter=adapter, salt=salt)

    def detokenizer(self, prompt_ids: bytes, *, skip_special_tokens: bool) -> Detokenizer:
        """For one sequence that continues a prompt."""
        if self.table is not None:
            return ByteDetokenizer(self.table.visible if skip_special_tokens else self.table.pieces)

        def decode(token_ids: Sequence[int]) -> str:
            return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return WindowDetokenizer(decode, unpack_ids(prompt_ids[-_CONTEXT_TOKENS * TOKEN_ID_BYTES :]))

    def token_bytes(self, token_id: int) -> bytes:
        """One token alone, special tokens written out."""
        if self.table is None:
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self.table.pieces[token_id] if token_id < len(self.table.pieces) else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def vocabulary_text(self, token_id: int) -> str:
        """The token as its vocabulary spells it."""
        text = self._tokens[token_id] if token_id < len(self._tokens) else None
        return text or ""


def build_model(
    card: ModelCard,
    artifacts: Mapping[str, bytes],
    *,
    tokenizer_backend: Backend = "auto",
    clock: Clock | None = None,
) -> ServedModel | RelayedModel:
    """From the files that a worker's model card names. Takes a second at most; run it in a thread.

    Raises `ModelError` when they do not make a tokenizer. Without a chat template the model is served without chat.
    """
    if card.relayed:
        return RelayedModel(card)
    data = artifacts.get(TOKENIZER_FILE)
    if data is None:
        raise ModelError(f"model {card.name} comes without {TOKENIZER_FILE}")
    file = read_tokenizer_file(data)
    tokenizer = load_tokenizer(data, tokenizer_backend, [token.content for token in file.added.values()])
    config = _read_config(artifacts.get(TOKENIZER_CONFIG_FILE, b"{}"))
    source = _template_source(artifacts, config)
    template = None
    if source is not None:
        template = ChatTemplate(source, _special_tokens(config, card, file), clock or RealClock())
    model = ServedModel(card, file, tokenizer, template)
    logger.info(
        "model %s: tokenizer %s, chat template %s, %s decoder",
        card.name,
        tokenizer.backend,
        template.backend if template is not None else "none",
        file.decoder,
    )
    return model


def _read_config(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{TOKENIZER_CONFIG_FILE} cannot be read: {error}") from error


def _template_source(artifacts: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    if TEMPLATE_FILE in artifacts:
        return artifacts[TEMPLATE_FILE].decode(errors="replace")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default") or next(iter(named.values()), None)
    return source if isinstance(source, str) else None


def _special_tokens(config: Mapping[str, Any], card: ModelCard, file: TokenizerFile) -> dict[str, str]:
    """`bos_token` and the like, which templates use by name."""
    found: dict[str, str] = {}
    ids = {"bos_token": card.bos_token_id, "eos_token": card.eos_token_ids[0] if card.eos_token_ids else None}
    for name, token_id in ids.items():
        spelled = file.tokens[token_id] if token_id is not None and token_id < len(file.tokens) else None
        if spelled is not None:
            found[name] = spelled
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
