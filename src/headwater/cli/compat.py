"""`headwater compat check -- vllm serve MODEL [flags]`, or SGLang's or TensorRT-LLM's line: the equivalent of it."""

import argparse
import shlex
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from headwater.compat.sglang import command as sglang
from headwater.compat.translation import VERDICTS, TranslatedCommand
from headwater.compat.trtllm import command as trtllm
from headwater.compat.vllm import command as vllm
from headwater.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("check",), help="say what becomes of the command line after `--`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(words=[])


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when every flag has an equivalent, 1 when some have none, or none that is known."""
    found = _translated(args.words)
    if args.json:
        _print_json(found)
    else:
        _print_table(found)
    return 0 if found.complete else 1


def _translated(words: Sequence[str]) -> TranslatedCommand:
    """Raises `ConfigError`."""
    if len(words) == 1:
        words = _words_of(words[0])
    if trtllm.is_trtllm(words):
        return trtllm.translate(words)
    if sglang.is_sglang(words):
        return sglang.translate(words)
    return vllm.translate(words)


def _words_of(line: str) -> list[str]:
    """A line that was quoted as a whole. Raises `ConfigError`."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"{line} cannot be split into words: {error}") from None


def _print_json(found: TranslatedCommand) -> None:
    flags = [
        {"given": flag.given, "verdict": flag.verdict, "words": flag.words, "note": flag.note} for flag in found.flags
    ]
    document = {"command": found.command, "complete": found.complete, "flags": flags}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")


def _print_table(found: TranslatedCommand) -> None:
    print(found.command)
    if found.flags:
        table = Table("flag", "what becomes of it", "note", box=None, pad_edge=False)
        for flag in found.flags:
            table.add_row(" ".join(flag.given), VERDICTS[flag.verdict], flag.note or " ".join(flag.words))
        print()
        Console().print(table)
