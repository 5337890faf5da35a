"""`headwater worker [MODEL]`: one worker that joins a registry."""

import argparse

import msgspec

from headwater.cli.engine_flags import config_from
from headwater.cli.flags import add_config_flags, add_model
from headwater.config.conflicts import check_worker
from headwater.config.fields import secrets_of
from headwater.logs import configure_logging
from headwater.worker.process import worker_main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_config_flags(parser, sections=("engine", "runtime"), names=("role", "transfer_backends", "transfer_checksums"))


def run(args: argparse.Namespace) -> int:
    loaded = config_from(args)
    check_worker(loaded)
    config = loaded.config
    configure_logging(config.runtime, "worker", secrets=secrets_of(config))
    # A graph's pools are for its supervisor to fill: this one is what `--role` says.
    config = msgspec.structs.replace(config, prefill=0, decode=0)
    return worker_main(config, worker_index=0, num_workers=1)
