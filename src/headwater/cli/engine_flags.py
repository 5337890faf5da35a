"""Flags that belong to the engine's own command line, for engines that have one.

`headwater serve MODEL --engine vllm --enforce-eager --swap-space 4`: what is not ours is kept, word for word, for
vLLM's parser, which checks it in the worker. A flag of ours keeps its meaning; several words after one that takes a
list (`--served-model-name a b`, as vLLM has it) are taken one by one. MODEL comes before the flags.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from headwater.cli.flags import load_from
from headwater.config.fields import ENVIRONMENT_PREFIX, fields_of
from headwater.config.load import LoadedConfig
from headwater.config.words import flag_groups
from headwater.errors import ConfigError

_THEIRS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "vllm": {
        "block_size": ("--block-size",),
        "max_num_seqs": ("--max-num-seqs",),
        "max_model_len": ("--max-model-len",),
        "max_num_batched_tokens": ("--max-num-batched-tokens",),
        "num_kv_blocks": ("--num-gpu-blocks-override",),
        "kv_cache_memory": ("--kv-cache-memory-bytes",),
        "tensor_parallel_size": ("--tensor-parallel-size", "-tp"),
    },
    "sglang": {
        "block_size": ("--page-size",),
        "max_num_seqs": ("--max-running-requests",),
        "max_model_len": ("--context-length",),
        "max_num_batched_tokens": ("--chunked-prefill-size",),
        "num_kv_blocks": ("--max-total-tokens",),
        "tensor_parallel_size": ("--tensor-parallel-size", "--tp-size", "--tp"),
    },
    "trtllm": {
        "block_size": ("--kv-cache-config.tokens-per-block",),
        "max_num_seqs": ("--max-batch-size",),
        "max_model_len": ("--max-seq-len",),
        "max_num_batched_tokens": ("--max-num-tokens",),
        "num_kv_blocks": ("--kv-cache-config.max-tokens",),
        "kv_cache_memory": ("--kv-cache-config.max-gpu-total-bytes",),
        "tensor_parallel_size": ("--tensor-parallel-size", "--tp-size"),
    },
}
"""By engine: what it calls some of ours."""
_TOLD = ("block_size", "max_num_seqs")
"""Ours have a default that is not the engine's: what was said must reach the engine even if it is equal."""

ENGINES_WITH_FLAGS = tuple(_THEIRS)

_ATTRIBUTE = "engine_words"


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """As `parser.parse_args`; the engine's own words are kept for `config_from`."""
    if "--engine" not in parser._option_string_actions:
        return _with_rest(parser, arguments)
    own, words = take_engine_words(parser, arguments)
    args = parser.parse_args(own)
    setattr(args, _ATTRIBUTE, words)
    return args


def _with_rest(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Words after two dashes are nobody's flags: for verbs that take a command line, they are its `words`."""
    if parser.get_default("words") is None or "--" not in arguments:
        return parser.parse_args(arguments)
    border = list(arguments).index("--")
    args = parser.parse_args(arguments[:border])
    args.words = list(arguments[border + 1 :])
    return args


def take_engine_words(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[list[str], list[str]]:
    """Ours, and the engine's own; all are ours unless the engine has a command line."""
    if _engine(arguments, os.environ if environ is None else environ) not in ENGINES_WITH_FLAGS:
        return list(arguments), []
    own: list[str] = []
    engine: list[str] = []
    for group in flag_groups(arguments):
        action = parser._option_string_actions.get(group[0].partition("=")[0])
        if action is None and group[0].startswith("-"):
            engine += group
        elif action is not None and isinstance(action, argparse._AppendAction) and len(group) > 2:
            own += [word for value in group[1:] for word in (group[0], value)]
        else:
            own += group
    return own, engine


def config_from(args: argparse.Namespace) -> LoadedConfig:
    """As `load_from`, with what the engine's own command line is to be told. Raises `ConfigError` for what was said in
    our words and in the engine's."""
    loaded = load_from(args)
    engine = loaded.config.engine
    if engine.engine not in ENGINES_WITH_FLAGS:
        return loaded
    words = [*engine.engine_args, *getattr(args, _ATTRIBUTE, [])]
    said = {word.partition("=")[0].replace("_", "-"): word for word in words if word.startswith("-")}
    for name, theirs in _THEIRS[engine.engine].items():
        if loaded.origins[f"engine.{name}"].layer == "default":
            continue
        if twice := said.keys() & theirs:
            ours = fields_of()[name].flag
            raise ConfigError(
                f"{ours} {getattr(engine, name)} and {said[min(twice)]}, which {engine.engine} is given, say the same",
                hint="say it once",
            )
        if name in _TOLD:
            words += [theirs[0], str(getattr(engine, name))]
    engine = msgspec.structs.replace(engine, engine_args=tuple(words))
    return LoadedConfig(msgspec.structs.replace(loaded.config, engine=engine), loaded.origins)


def _engine(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    name = environ.get(f"{ENVIRONMENT_PREFIX}ENGINE", "")
    for word, following in pairwise([*arguments, ""]):
        if word == "--engine":
            name = following
        elif word.startswith("--engine="):
            name = word.partition("=")[2]
    return name
