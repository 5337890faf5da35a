"""The verbs of the command line: which module answers to which word. A verb's module is imported only when called."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from headwater.cli.parser import Parser

AddArguments = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Verb:
    """Its module offers `add_arguments(parser)` and `run(args) -> exit code`."""

    module: str
    summary: str
    usage: str = "[flags]"


VERBS: dict[str, Verb] = {
    "serve": Verb("headwater.cli.serve", "serve a model: starts and supervises all parts", "[MODEL] [flags]"),
    "chat": Verb("headwater.cli.chat", "talk to a server from the terminal"),
    "status": Verb("headwater.cli.status", "show the workers of a running cluster"),
    "sleep": Verb("headwater.cli.sleep", "let a worker give its device's memory back for a while", "WORKER [flags]"),
    "wake": Verb("headwater.cli.wake", "let a worker that sleeps be ready again", "WORKER [flags]"),
    "drain": Verb("headwater.cli.drain", "let a worker finish or hand over its streams and leave", "WORKER [flags]"),
    "restart": Verb("headwater.cli.restart", "restart a running cluster, one process after the other"),
    "explain": Verb("headwater.cli.explain", "say why a request went to its worker", "REQUEST_ID [flags]"),
    "doctor": Verb("headwater.cli.doctor", "check this machine and say what to do"),
    "models": Verb("headwater.cli.models", "list models that can be served by name"),
    "bench": Verb("headwater.cli.bench", "measure an OpenAI-compatible server", "serve [flags]"),
    "simulate": Verb("headwater.cli.simulate", "try a cluster in virtual time, policies side by side"),
    "advise": Verb("headwater.cli.advise", "say how to serve a model: aggregated, split or adaptive"),
    "kv": Verb("headwater.cli.kv", "run a node's KV store and look after it", "serve|stat|ls|verify|clear|warm|bench"),
    "transfer": Verb("headwater.cli.transfer", "measure how fast memory moves between processes", "bench [flags]"),
    "record": Verb("headwater.cli.record", "describe and merge recorded requests for a replay", "FILE ... [flags]"),
    "keys": Verb("headwater.cli.keys", "keys of clients, limits of tenants, keys of a cluster", "ACTION [flags]"),
    "config": Verb("headwater.cli.config", "show, check and document the configuration", "show|validate|schema|docs"),
    "frontend": Verb("headwater.cli.frontend", "run one frontend that joins a registry"),
    "compat": Verb(
        "headwater.cli.compat",
        "translate a line that starts vLLM, SGLang or TensorRT-LLM",
        "check [--json] -- vllm serve ...",
    ),
    "worker": Verb("headwater.cli.worker", "run one worker that joins a registry", "[MODEL] [flags]"),
    "completion": Verb("headwater.cli.completion", "print a shell completion script", "SHELL"),
}


def parser_of(name: str) -> Parser:
    """The parser of one verb, complete."""
    prog = f"headwater {name}"
    parser = Parser(prog, usage=f"{prog} {VERBS[name].usage}", description=f"{_sentence(VERBS[name].summary)}.")
    add_arguments_of(name, parser)
    return parser


def add_arguments_of(name: str, parser: Parser) -> None:
    cast(AddArguments, import_module(VERBS[name].module).add_arguments)(parser)


def runner_of(name: str) -> Run:
    return cast(Run, import_module(VERBS[name].module).run)


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:]
