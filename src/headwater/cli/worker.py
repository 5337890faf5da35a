"""`headwater worker [MODEL]`: one worker that joins a registry."""

import argparse

from headwater.cli.engine_flags import config_from
from headwater.cli.flags import add_config_flags, add_model
from headwater.config.fields import secrets_of
from headwater.logs import configure_logging
from headwater.worker.process import worker_main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_config_flags(parser, sections=("engine", "runtime"), names=("role", "transfer_backends", "transfer_checksums"))


def run(args: argparse.Namespace) -> int:
    config = config_from(args).config
    configure_logging(config.runtime, "worker", secrets=secrets_of(config))
    return worker_main(config, worker_index=0, num_workers=1)
