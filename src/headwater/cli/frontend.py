"""`headwater frontend`: one frontend that joins a registry."""

import argparse

import uvloop

from headwater.cli.flags import add_config_flags, load_from
from headwater.config.fields import secrets_of
from headwater.frontend.process import run_frontend
from headwater.logs import configure_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser, sections=("frontend", "router", "faults", "runtime"), names=("frontends",))


def run(args: argparse.Namespace) -> int:
    config = load_from(args).config
    configure_logging(config.runtime, "frontend", secrets=secrets_of(config))
    return uvloop.run(run_frontend(config, share_port=config.frontends > 1))
