"""Short names for models, so that `headwater serve qwen3-0.6b` works.

A distribution adds names of its own through the entry point group `headwater.models`: each entry point is a mapping
from short name to hub id (`org/name` or `org/name@revision`).
"""

import difflib
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Final

from headwater.errors import ConfigError

GROUP: Final = "headwater.models"

_BUILT_IN: Final = {
    "smollm2": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}


def catalogue() -> dict[str, str]:
    """Hub id by short name, in lower case; installed distributions override the built-in names."""
    names = dict(_BUILT_IN)
    for entry in entry_points(group=GROUP):
        added = entry.load()
        if not isinstance(added, Mapping):
            raise ConfigError(f"entry point {entry.name!r} of {GROUP} is not a mapping from name to hub id")
        names.update({str(name).lower(): str(hub_id) for name, hub_id in added.items()})
    return names


def nearest(given: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names that look most like the given one, best first."""
    by_folded = {name.lower(): name for name in known}
    return [by_folded[name] for name in difflib.get_close_matches(given.lower(), by_folded, n=count, cutoff=0.5)]
