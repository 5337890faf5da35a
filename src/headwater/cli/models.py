"""`headwater models`: names that `headwater serve` takes, and what of them lies on this host already."""

import argparse
import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwater.config.units import about_bytes
from headwater.weights.cache import default_cache_folder
from headwater.weights.catalogue import catalogue
from headwater.weights.demo import NAME as DEMO_NAME
from headwater.weights.demo import PACKAGE


@dataclass(frozen=True, slots=True)
class Listed:
    """A model that can be named."""

    name: str
    source: str
    bytes_on_disk: int | None
    """None: it would be fetched first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--local", action="store_true", help="only what needs no download")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    models = [model for model in known_models() if not args.local or model.bytes_on_disk is not None]
    if args.json:
        print(json.dumps([asdict(model) for model in models], indent=2))
    else:
        _print(models)
    return 0


def known_models() -> list[Listed]:
    """The demo model, the catalogue, and whatever else the hub's cache holds."""
    cached = _hub_cache()
    names = catalogue()
    models = [Listed(f"{DEMO_NAME} (without MODEL)", f"package {PACKAGE}", _demo_bytes())]
    models += [Listed(name, hub_id, cached.get(hub_id.partition("@")[0])) for name, hub_id in sorted(names.items())]
    known = {hub_id.partition("@")[0] for hub_id in names.values()}
    return models + [Listed(repo, repo, size) for repo, size in sorted(cached.items()) if repo not in known]


def _demo_bytes() -> int | None:
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = [default_cache_folder() / "demo", *map(Path, spec.submodule_search_locations or () if spec else ())]
    return next((file.stat().st_size for folder in folders for file in folder.glob("*.gguf")), None)


def _hub_cache() -> dict[str, int]:
    """Bytes by repository, of the models in huggingface_hub's own cache."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return {}
    import huggingface_hub

    try:
        cache = huggingface_hub.scan_cache_dir()
    except huggingface_hub.CacheNotFound:
        return {}
    return {repo.repo_id: repo.size_on_disk for repo in cache.repos if repo.repo_type == "model"}


def _print(models: list[Listed]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "source", "on this host"):
        table.add_column(title)
    for model in models:
        size = model.bytes_on_disk
        table.add_row(Text(model.name), Text(model.source), "-" if size is None else about_bytes(size))
    Console(highlight=False).print(table)
    print("\nOr a folder with safetensors, a GGUF file, or a hub id: org/repo, org/name/file.gguf, org/name@revision.")
