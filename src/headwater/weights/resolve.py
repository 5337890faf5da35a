"""From a MODEL argument to local files.

    None                       the demo model
    an existing path           a folder (config.json, safetensors, tokenizer.json) or a GGUF file
    the demo model's name      the demo model
    a catalogue name           a hub id
    org/name[/file.gguf][@rev] fetched from the hub
    anything else              refused, with the nearest names

Importing this needs neither torch nor numpy; resolving never executes or unpickles anything of the model's.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from headwater.engines.base import Progress, ProgressSink
from headwater.errors import ModelError
from headwater.weights import documents, gguf_texts, hub
from headwater.weights.base import ResolvedModel
from headwater.weights.cache import default_cache_folder, files_digest
from headwater.weights.catalogue import catalogue, nearest
from headwater.weights.demo import NAME as DEMO_NAME
from headwater.weights.demo import PACKAGE, VERSION, demo_gguf
from headwater.weights.gguf import is_gguf

_PATH_PREFIXES: Final = ("/", "./", "../", "~")
_INDEX: Final = "model.safetensors.index.json"
_VOLATILE_CONFIG_KEYS: Final = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class _Options:
    tokenizer: str | None
    chat_template: str | None
    progress: ProgressSink
    cache: Path
    offline: bool


def resolve(
    model: str | None,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    progress: ProgressSink = lambda _: None,
    cache: Path | None = None,
    offline: bool = False,
) -> ResolvedModel:
    """Find, or fetch, the model. Blocks; raises `ModelError`. `cache`: the user's cache folder unless given."""
    options = _Options(tokenizer, chat_template, progress, cache or default_cache_folder(), offline)
    progress(Progress("resolve", detail=model or DEMO_NAME))
    if model is None:
        return _demo(options)
    path = Path(model).expanduser()
    if path.exists():
        return _from_path(path, options)
    if model.lower() == DEMO_NAME:
        return _demo(options)
    if model.startswith(_PATH_PREFIXES):
        raise ModelError(f"there is no file or folder {model}{_meant(model, _neighbours(path))}")
    hub_id = _hub_id(model, revision)
    return _from_hub(hub_id, options)


def _demo(options: _Options) -> ResolvedModel:
    file = demo_gguf(options.cache, options.progress, offline=options.offline)
    return replace(_from_gguf(file, options), name=DEMO_NAME, origin=f"package {PACKAGE} {VERSION}")


def _hub_id(model: str, revision: str | None) -> hub.HubId:
    names = catalogue()
    parsed = hub.parse_hub_id(names.get(model.lower(), model))
    if parsed is None:
        meant = _meant(model, names)
        listed = "`headwater models` lists the catalogue" if meant else f"Catalogue: {', '.join(sorted(names))}"
        raise ModelError(
            f"{model!r} is neither a file, a folder, a catalogue name nor a hub id{meant}",
            hint=f"{listed}. Hub ids look like org/name or org/name@revision.",
        )
    if revision is not None and parsed.revision not in (None, revision):
        raise ModelError(f"two revisions are given: {parsed.revision} in {model!r} and {revision}")
    return replace(parsed, revision=revision or parsed.revision)


def _meant(given: str, known: dict[str, str] | list[str]) -> str:
    close = nearest(Path(given).name if given.startswith(_PATH_PREFIXES) else given, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _neighbours(path: Path) -> list[str]:
    return [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []


def _from_hub(hub_id: hub.HubId, options: _Options) -> ResolvedModel:
    snapshot = hub.fetch(hub_id, options.progress, offline=options.offline)
    found = _from_gguf(snapshot.gguf, options) if snapshot.gguf else _from_folder(snapshot.folder, options)
    name = hub_id.repo.partition("/")[2].lower()
    return replace(found, name=name, origin=f"hub {hub_id.repo}@{snapshot.commit[:12]}", revision=snapshot.commit)


def _from_path(path: Path, options: _Options) -> ResolvedModel:
    if path.is_file():
        if not is_gguf(path):
            raise ModelError(f"{path} is not a GGUF file", hint="For safetensors name the folder, not a file.")
        return _from_gguf(path, options)
    if (path / "config.json").exists():
        return _from_folder(path, options)
    ggufs = sorted(file for file in path.glob("*.gguf") if gguf_texts.is_first_shard(file))
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0], options)
    if ggufs:
        raise ModelError(f"{path} holds several GGUF files: {', '.join(f.name for f in ggufs)}", hint="Name one.")
    raise ModelError(f"{path} is no model folder: it has neither a config.json nor a GGUF file")


def _from_gguf(file: Path, options: _Options) -> ResolvedModel:
    texts = gguf_texts.read(file)
    tokenizer = documents.tokenizer_file(options.tokenizer, None) or texts.tokenizer_json()
    template = documents.chat_template(options.chat_template, None, {"chat_template": texts.chat_template})
    digest = _digest(texts.files, options)
    return ResolvedModel(
        kind="gguf",
        name=gguf_texts.model_name(file),
        origin=f"file {file}",
        weight_files=texts.files,
        config={},
        tokenizer_json=tokenizer,
        weights_digest=digest,
        fingerprint=_fingerprint(digest, {}, tokenizer),
        tokenizer_config=texts.tokenizer_config,
        chat_template=template,
        bos_token_id=texts.bos_token_id,
        eos_token_ids=texts.eos_token_ids,
        default_sampling=texts.default_sampling,
    )


def _from_folder(folder: Path, options: _Options) -> ResolvedModel:
    config = documents.read_json(folder / "config.json")
    generation = documents.read_json_if_there(folder / "generation_config.json")
    tokenizer_config = documents.read_json_if_there(folder / "tokenizer_config.json")
    tokenizer = documents.tokenizer_file(options.tokenizer, folder)
    if tokenizer is None:
        raise ModelError(
            f"{folder} has no tokenizer.json",
            hint="Give one with --tokenizer; AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one.",
        )
    files = _safetensors_files(folder)
    digest = _digest(files, options)
    bos = documents.token_ids(generation.get("bos_token_id", config.get("bos_token_id")))
    eos = documents.token_ids(generation.get("eos_token_id")) or documents.token_ids(config.get("eos_token_id"))
    return ResolvedModel(
        kind="safetensors",
        name=folder.resolve().name.lower(),
        origin=f"folder {folder}",
        weight_files=files,
        config=config,
        tokenizer_json=tokenizer,
        weights_digest=digest,
        fingerprint=_fingerprint(digest, config, tokenizer),
        tokenizer_config=json.dumps(tokenizer_config).encode() if tokenizer_config else None,
        chat_template=documents.chat_template(options.chat_template, folder, tokenizer_config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        default_sampling=documents.sampling_defaults(generation),
    )


def _safetensors_files(folder: Path) -> tuple[Path, ...]:
    """The weight files, from the index when there is one. All must be there."""
    if (folder / _INDEX).exists():
        weight_map = documents.read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{_INDEX} has no weight_map")
        names = sorted({documents.plain_name(name, _INDEX) for name in weight_map.values()})
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
        names = ["model.safetensors"] if "model.safetensors" in names else names
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing[:5])}", hint="The download may be incomplete.")
    if not names:
        hint = "Pickled weights (*.bin) are never loaded; convert them." if any(folder.glob("*.bin")) else None
        raise ModelError(f"{folder} has no safetensors files", hint=hint)
    return tuple(folder / name for name in names)


def _digest(files: tuple[Path, ...], options: _Options) -> str:
    total = sum(file.stat().st_size for file in files)
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        options.progress(Progress("resolve", done, total, "bytes", "identifying the weights"))

    return files_digest(options.cache, files, on_bytes)


def _fingerprint(weights_digest: str, config: dict[str, object], tokenizer_json: bytes) -> str:
    lasting = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    parts = (weights_digest, json.dumps(lasting, sort_keys=True), hashlib.sha256(tokenizer_json).hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
