"""Tokenizer and chat template of a server's model: from the operator, or from where the server has its files.

They are trusted only if the server tokenizes some texts to the same ids, so a wrong tokenizer is found before the
first request and not by its garbled answer.
"""

import asyncio
import json
import logging
from pathlib import Path

import msgspec

from headwater.config.schema import EngineConfig
from headwater.engines.attached.dialects.base import Description, TokenDialect
from headwater.engines.attached.http import Server
from headwater.engines.base import ProgressSink
from headwater.engines.texts import ModelTexts, model_texts
from headwater.errors import HeadwaterError, ModelError

_log = logging.getLogger(__name__)

_PROBES = (
    "Hello, world!\n\n  Ünïcödé 中文 😀 <|im_start|>user",
    "def f(x):\n\treturn x**2 + 1234567890  # done",
)


async def server_texts(
    config: EngineConfig, server: Server, dialect: TokenDialect, found: Description, progress: ProgressSink
) -> ModelTexts | None:
    """None, and the reason in the log, when there are none to be trusted."""
    source = config.tokenizer or config.model or _local(found.files)
    if source is None:
        _log.warning(
            "no tokenizer for %s: give the model's folder or hub id as MODEL, or its tokenizer with --tokenizer",
            found.model,
        )
        return None
    tokenizer = config.tokenizer or _local(source)
    try:
        texts = await asyncio.to_thread(model_texts, msgspec.structs.replace(config, tokenizer=tokenizer), progress)
        await _check(texts, server, dialect, found.model)
    except HeadwaterError as error:
        _log.warning("the tokenizer at %s cannot be used for %s: %s", source, found.model, error)
        return None
    return texts


async def _check(texts: ModelTexts, server: Server, dialect: TokenDialect, model: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = await asyncio.to_thread(Tokenizer.from_str, texts.tokenizer_json.decode())
    for probe in _PROBES:
        theirs = await dialect.tokenize(server, model, probe)
        ours = tokenizer.encode(probe, add_special_tokens=True).ids
        if isinstance(theirs, int):
            if len(ours) != theirs:
                raise ModelError(f"it makes {len(ours)} tokens of {probe[:20]!r}, the server {theirs}")
        elif ours != theirs:
            raise ModelError(f"it makes {ours[:8]}... of {probe[:20]!r}, the server {theirs[:8]}...")


def vocabulary_size(texts: ModelTexts, found: Description) -> int:
    """The model's, if its configuration is at hand, else the tokenizer's."""
    folder = _local(found.files)
    if folder is not None:
        try:
            config = json.loads((Path(folder) / "config.json").read_text())
            size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
            if isinstance(size, int):
                return size
        except (OSError, ValueError):
            pass  # the tokenizer will do
    document = msgspec.json.decode(texts.tokenizer_json)
    vocabulary = document.get("model", {}).get("vocab", ())
    added = [token.get("id", 0) for token in document.get("added_tokens", ())]
    return max(len(vocabulary), *(number + 1 for number in added)) if added else len(vocabulary)


def _local(files: str | None) -> str | None:
    return files if files is not None and Path(files).is_dir() else None
