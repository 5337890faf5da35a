"""The worker process: chooses the concrete parts, runs them, obeys signals.

First SIGTERM or SIGINT: drain within `drain_timeout`, then exit code 0. Second: leave now, exit code 143. A failed
engine raises `EngineFailed` after its streams were told and the lease was given up, so that a supervisor restarts it.
"""

import asyncio
import logging
import os
import resource
import secrets
import signal
from collections.abc import Callable
from pathlib import PurePath

import uvloop

from headwater.config.schema import EngineConfig, ServeConfig
from headwater.engines.base import Engine, Placement, Progress, ProgressSink
from headwater.engines.registry import create_engine
from headwater.errors import ConfigError
from headwater.runtime.planes import open_planes
from headwater.runtime.registry.open import open_registry
from headwater.tiers.socket import store_socket
from headwater.worker.roles import engine_of, role_of, transfer_options
from headwater.worker.shell import ShellConfig, WorkerShell

_log = logging.getLogger(__name__)

EXIT_HURRIED = 128 + signal.SIGTERM
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_DESCRIPTORS = 16384
_OWN_STORE_S = 30.0
"""A store of the same graph is on its way for certain, and a disk tier takes a moment to be read."""
_OTHER_STORE_S = 2.0

MakeEngine = Callable[[EngineConfig, Placement], Engine]


def worker_main(
    config: ServeConfig, *, worker_index: int, num_workers: int, progress: ProgressSink | None = None
) -> int:
    """`run_worker` as a whole process. Ends the process itself when a thread may still be loading or computing."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        engine = create_engine(engine_of(config, worker_index), _placement(config, worker_index, num_workers))
        shell = runner.run(_run(config, engine, worker_index, progress))
        code = _exit_code(shell)
        if shell.abandoned:
            logging.shutdown()
            os._exit(code)
    return code


async def run_worker(
    config: ServeConfig,
    *,
    worker_index: int,
    num_workers: int,
    progress: ProgressSink | None = None,
    make_engine: MakeEngine = create_engine,
) -> int:
    """Serve until told to stop; returns the exit code. Raises `ConfigError`, `ModelError`, `EngineFailed`."""
    engine = make_engine(engine_of(config, worker_index), _placement(config, worker_index, num_workers))
    return _exit_code(await _run(config, engine, worker_index, progress))


async def _run(config: ServeConfig, engine: Engine, worker_index: int, progress: ProgressSink | None) -> WorkerShell:
    if config.runtime.registry is None:
        raise ConfigError("a worker on its own needs --registry", hint="for example --registry file:///run/headwater")
    _allow_descriptors()
    planes = open_planes(config.runtime)
    registry = open_registry(config.runtime.registry)
    shell = WorkerShell(engine, registry, planes, _shell_config(config, worker_index))
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, shell.stop)
    try:
        await shell.run(progress or log_progress)
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
        await registry.close()
        await planes.close()
    return shell


def _placement(config: ServeConfig, worker_index: int, num_workers: int) -> Placement:
    return Placement(worker_index, num_workers, store_socket(config.kv))


def _exit_code(shell: WorkerShell) -> int:
    return EXIT_HURRIED if shell.hurried else 0


def log_progress(progress: Progress) -> None:
    """For a worker that nobody watches."""
    total = "" if progress.total is None else f" of {progress.total:g}"
    amount = f" {progress.done:g}{total} {progress.unit}" if progress.done or total else ""
    _log.info("%s%s %s", progress.phase, amount, progress.detail)


def _shell_config(config: ServeConfig, worker_index: int) -> ShellConfig:
    engine = config.engine
    role, adaptive = role_of(config, worker_index)
    return ShellConfig(
        worker_id=f"worker-{worker_index}-{secrets.token_hex(4)}",
        engine=engine.engine,
        served_name=engine.served_model_name[0] if engine.served_model_name else PurePath(engine.model or "").name,
        role=role,
        adaptive=adaptive,
        drain_timeout_s=config.runtime.drain_timeout,
        transfer=transfer_options(config),
        kv_socket=store_socket(config.kv),
        kv_patience_s=_OWN_STORE_S if config.kv.own_store else _OTHER_STORE_S,
    )


def _allow_descriptors() -> None:
    """Many frontends need many descriptors; take as many as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
