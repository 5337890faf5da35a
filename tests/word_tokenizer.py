"""A tokenizer of made-up words, one per token id, for engines whose tokens mean nothing."""

import json
from pathlib import Path

from headwater.engines.suite import VOCABULARY


def write_word_tokenizer(folder: Path, num_words: int = VOCABULARY + 20) -> Path:
    """`tokenizer.json` in the folder. The defaults are for prompts of the engine suite and answers of the mocker."""
    vocab = {f"Ġ{chr(97 + n // 26)}{chr(97 + n % 26)}": n for n in range(num_words)}
    model = {"type": "WordLevel", "vocab": {**vocab, "[UNK]": len(vocab)}, "unk_token": "[UNK]"}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    return path
