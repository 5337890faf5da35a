"""`headwater config`: show the effective configuration, check a file, print the schema or the reference."""

import argparse
import sys
from pathlib import Path

from headwater.cli.flags import GRAPH, add_config_flags, load_from
from headwater.config.fields import sections_of
from headwater.config.load import load_config
from headwater.config.show import json_schema, reference_markdown, show_json, show_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", prog="headwater config", required=True)
    show = actions.add_parser("show", help="print every value; takes the flags of `serve`")
    show.add_argument("--origin", action="store_true", help="say where each value came from")
    show.add_argument("--json", action="store_true", help="for machines")
    add_config_flags(show, sections=(GRAPH, *sections_of()))
    validate = actions.add_parser("validate", help="check a file")
    validate.add_argument("file", type=Path, metavar="FILE")
    actions.add_parser("schema", help="print the JSON schema of the file, for editors")
    actions.add_parser("docs", help="print the reference of all keys in Markdown")


def run(args: argparse.Namespace) -> int:
    match args.action:
        case "show":
            loaded = load_from(args)
            print(show_json(loaded, origin=args.origin) if args.json else show_text(loaded, origin=args.origin))
        case "validate":
            load_config(file=args.file)
            print(f"{args.file}: fine")
        case "schema":
            print(json_schema())
        case "docs":
            sys.stdout.write(reference_markdown())
    return 0
