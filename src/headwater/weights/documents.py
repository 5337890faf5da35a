"""The small files beside the weights: configuration, generation defaults, tokenizer, chat template.

Sizes are bounded and contents checked for shape, because these files come from outside; a file name found inside one
of them is accepted only as a plain name in the same folder.
"""

import json
from pathlib import Path
from typing import Final

from headwater.errors import ModelError

Json = dict[str, object]

_MAX_JSON_BYTES: Final = 32 << 20
_MAX_TOKENIZER_BYTES: Final = 512 << 20
_MAX_TEMPLATE_BYTES: Final = 4 << 20
_SAMPLING_KEYS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`."""
    try:
        if not path.is_file():
            raise ModelError(f"{path} is not a file")
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelError(f"{path.name} has {size} bytes, more than the {max_bytes} we would read")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def read_json(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> Json:
    """A JSON object from a file."""
    try:
        document = json.loads(read_bounded(path, max_bytes))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path.name} holds no JSON object")
    return document


def read_json_if_there(path: Path) -> Json:
    return read_json(path) if path.exists() else {}


def read_template(path: Path) -> str:
    try:
        return read_bounded(path, _MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path.name} is not UTF-8 text: {error.reason}") from error


def plain_name(name: object, source: str) -> str:
    """A file name from inside a document, refused unless it stays in its folder."""
    if not isinstance(name, str) or Path(name).name != name or name in {"", ".", ".."} or "\0" in name:
        raise ModelError(f"{source} names the file {name!r}, which is not a plain file name")
    return name


def tokenizer_file(given: str | None, folder: Path | None) -> bytes | None:
    """tokenizer.json: the one `given` by the operator (a file, or a folder with one), else the one in `folder`."""
    if given is not None:
        path = Path(given).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ModelError(f"no tokenizer at {given}", hint="Give a tokenizer.json or a folder that holds one.")
    elif folder is not None and (folder / "tokenizer.json").exists():
        path = folder / "tokenizer.json"
    else:
        return None
    content = read_bounded(path, _MAX_TOKENIZER_BYTES)
    if not content.lstrip()[:1] == b"{":
        raise ModelError(f"{path} is not a tokenizer.json")
    return content


def chat_template(given: str | None, folder: Path | None, tokenizer_config: Json) -> str | None:
    """The operator's template, else the model's, in the order in which publishers moved it about."""
    if given is not None:
        return read_template(Path(given).expanduser())
    if folder is not None and (folder / "chat_template.jinja").exists():
        return read_template(folder / "chat_template.jinja")
    if folder is not None and (folder / "chat_template.json").exists():
        return _default_template(read_json(folder / "chat_template.json").get("chat_template"))
    return _default_template(tokenizer_config.get("chat_template"))


def _default_template(value: object) -> str | None:
    """A template, or the one called `default` in a list of named ones."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        chosen = named.get("default")
        return chosen if isinstance(chosen, str) else None
    return None


def token_ids(value: object) -> tuple[int, ...]:
    """`eos_token_id` as written: absent, one id, or a list of ids."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def sampling_defaults(generation: Json) -> dict[str, float]:
    """What generation_config.json recommends."""
    values = {key: generation.get(key) for key in _SAMPLING_KEYS}
    return {k: float(v) for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
