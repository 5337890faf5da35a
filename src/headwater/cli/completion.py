"""`headwater completion SHELL`: a completion script, made from the parsers of all verbs."""

import argparse

import shtab

from headwater.cli.flags import config_key
from headwater.cli.parser import Parser
from headwater.cli.verbs import VERBS, add_arguments_of
from headwater.config.fields import fields_of

SHELLS = ("bash", "zsh", "tcsh")

_FILE_KEYS = frozenset({"model", "config_model", "chat_template", "tokenizer", "config", "file"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="put its output where your shell looks for completions")


def run(args: argparse.Namespace) -> int:
    print(script_for(args.shell))
    return 0


def script_for(shell: str) -> str:
    root = Parser("headwater", description="Distributed serving of large language models.")
    root.add_argument("--version", action="store_true", help="print the version")
    verbs = root.add_subparsers()
    for name, verb in VERBS.items():
        parser = verbs.add_parser(name, help=verb.summary)
        add_arguments_of(name, parser)
    _offer_values(root)
    return str(shtab.complete(root, shell=shell))


def _offer_values(parser: argparse.ArgumentParser) -> None:
    """What may follow a flag, where that is a closed set or a file."""
    fields = fields_of()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for nested in action.choices.values():
                _offer_values(nested)
        name = config_key(action)
        if name is not None and fields[name].choices:
            action.choices = fields[name].choices
        elif name in _FILE_KEYS or action.dest in _FILE_KEYS:
            setattr(action, "complete", shtab.FILE)  # noqa: B010 - shtab's protocol, unknown to argparse's types
