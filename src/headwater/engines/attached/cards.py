"""What an attached server is to the rest of the cluster: its card and its sizes, from what it says of itself.

Where it says nothing the operator's word holds, and where there is none either, a usual value.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from headwater.config.schema import EngineConfig
from headwater.engines.attached.dialects.base import Description, Dialect, HandsOver
from headwater.engines.attached.http import ServerAddress
from headwater.engines.attached.relay import relay_card
from headwater.engines.attached.texts import vocabulary_size
from headwater.engines.base import EngineInfo
from headwater.engines.card import served_names, text_artifacts
from headwater.engines.texts import ModelTexts
from headwater.errors import ConfigError
from headwater.protocol.cluster import ModelCard

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 131_072
_BATCHED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a server's steps."""

    max_num_seqs: int
    max_num_batched_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, found: Description) -> Self:
        """The server's, where the operator has said nothing."""
        said = config.max_num_seqs != EngineConfig().max_num_seqs
        tokens = config.max_num_batched_tokens or found.max_num_batched_tokens or 0
        return cls(
            config.max_num_seqs if said or not found.max_num_seqs else found.max_num_seqs,
            tokens if tokens > 0 else _BATCHED_TOKENS,
        )


class Describer:
    """Of one server, for one configuration."""

    def __init__(self, config: EngineConfig, address: ServerAddress, dialect: Dialect, found: Description) -> None:
        self.sizes = Sizes.of(config, found)
        self._config = config
        self._address = address
        self._dialect = dialect
        self._found = found

    def with_tokens(self, texts: ModelTexts) -> EngineInfo:
        """Of a server that takes and gives token ids."""
        found, name = self._found, self._dialect.name
        artifacts, contents = text_artifacts(texts.tokenizer_json, texts.tokenizer_config, texts.chat_template)
        names = served_names(self._config, found.model)
        block_size = found.block_size or _BLOCK_SIZE
        identity = f"{name} {found.model} {texts.fingerprint} {block_size} {found.max_model_len}"
        max_model_len = found.max_model_len or self._config.max_model_len or _MAX_MODEL_LEN
        card = ModelCard(
            name=names[0],
            served_names=[*names, *found.adapters],
            adapters=list(found.adapters),
            fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
            architecture=name,
            dtype="unknown",
            kv_layout=f"{name}.b{block_size}",
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=vocabulary_size(texts, found),
            bos_token_id=texts.bos_token_id,
            eos_token_ids=list(texts.eos_token_ids),
            artifacts=artifacts,
            default_sampling=texts.default_sampling,
        )
        return self._info(
            card,
            found.kv_blocks or -(-max_model_len // block_size),
            artifacts=contents,
            tickets=isinstance(self._dialect, HandsOver),
            role=found.role,
            paired=found.role is not None,
            bootstrap=self._bootstrap(),
        )

    def relayed(self) -> EngineInfo:
        """Of a server that requests pass to as they are. Raises `ConfigError`."""
        found = self._found
        if found.role is not None:
            raise ConfigError(
                f"{self._address.url} does {found.role} alone, which takes token ids",
                hint="give the model's folder or hub id as MODEL, or its tokenizer with --tokenizer",
            )
        card = relay_card(self._config, found, self._dialect.name)
        return self._info(card, -(-card.max_model_len // card.block_size), artifacts={})

    def _bootstrap(self) -> str:
        """Where servers that decode reach this one: at the host where we do."""
        host, port = urlsplit(self._address.url).hostname, self._found.bootstrap_port
        return f"{host}:{port}" if port else ""

    def _info(self, card: ModelCard, kv_blocks: int, **more: Any) -> EngineInfo:
        return EngineInfo(
            engine=f"attached-{self._dialect.name}",
            card=card,
            kv_blocks=kv_blocks,
            max_num_seqs=self.sizes.max_num_seqs,
            max_num_batched_tokens=self.sizes.max_num_batched_tokens,
            hardware=f"attached-{self._address.url}",
            batch_invariant=False,
            **more,
        )
