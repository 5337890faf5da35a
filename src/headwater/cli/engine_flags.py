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
from headwater.config.fields import ENVIRONMENT_PREFIX
from headwater.config.load import LoadedConfig
from headwater.config.words import flag_groups

_SAID_TWICE: Mapping[str, Mapping[str, str]] = {
    "vllm": {"block_size": "--block-size", "max_num_seqs": "--max-num-seqs"},
    "sglang": {"block_size": "--page-size", "max_num_seqs": "--max-running-requests"},
    "trtllm": {"block_size": "--kv-cache-config.tokens-per-block", "max_num_seqs": "--max-batch-size"},
}
"""By engine. Ours have a default that is not the engine's: what was said must reach the engine even if it is equal."""

ENGINES_WITH_FLAGS = tuple(_SAID_TWICE)

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
    """As `load_from`, with what the engine's own command line is to be told."""
    loaded = load_from(args)
    engine = loaded.config.engine
    if engine.engine not in ENGINES_WITH_FLAGS:
        return loaded
    words = [*engine.engine_args, *getattr(args, _ATTRIBUTE, [])]
    for name, flag in _SAID_TWICE[engine.engine].items():
        if loaded.origins[f"engine.{name}"].layer != "default":
            words += [flag, str(getattr(engine, name))]
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
