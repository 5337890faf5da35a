"""`headwater bench`: the load generator of `headwater.bench`, mounted on the command line."""

import argparse
from importlib import import_module
from typing import cast

from headwater.cli.verbs import AddArguments, Run

_MODULES = {"serve": "headwater.bench.command"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", metavar="KIND", prog="headwater bench", required=True)
    for name, module in _MODULES.items():
        nested = kinds.add_parser(name, help="put a load on a server and say how it held")
        cast(AddArguments, import_module(module).add_arguments)(nested)


def run(args: argparse.Namespace) -> int:
    return cast(Run, import_module(_MODULES[args.bench]).run)(args)
