"""`headwater serve [MODEL]`: a whole cluster on this host, supervised until it is told to stop."""

import argparse
import asyncio
import logging
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
from rich.console import Console

from headwater.cli.engine_flags import config_from
from headwater.cli.flags import GRAPH, add_config_flags, add_model
from headwater.cli.http import Server
from headwater.cli.log_writer import LogWriter
from headwater.cli.serve_display import ServeDisplay, prefix, print_ready
from headwater.config.conflicts import check_graph
from headwater.config.fields import secrets_of, sections_of
from headwater.config.schema import KvConfig, ServeConfig
from headwater.config.units import about_bytes
from headwater.config.urls import http_url
from headwater.deploy.actions import Finish
from headwater.deploy.clusters import ClusterFolder, ClusterRecord, cluster_folder
from headwater.deploy.local import LocalSupervisor, parts_of
from headwater.deploy.ports import base_url, reserved_port
from headwater.engines.native.host import free_memory_bytes
from headwater.errors import ConfigError, HeadwaterError
from headwater.frontend.http.tls import open_tls
from headwater.frontend.tenants.tenancy import check_keyring, check_public
from headwater.kv.node.address import SOCKET_NAME
from headwater.logs import configure_logging
from headwater.protocol.cluster import Instance
from headwater.runtime.loopback import is_loopback
from headwater.runtime.registry.open import open_registry
from headwater.tiers.socket import store_socket
from headwater.worker.roles import num_workers

_log = logging.getLogger("headwater.serve")

_PROCESS_BYTES = 40 * 1024 * 1024
"""Least memory of one process, without any model."""
_POLL_S = 0.1
_POLL_TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_config_flags(parser, sections=(GRAPH, *sections_of()))


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    loaded = config_from(args)
    check_graph(loaded)
    config = loaded.config
    with ExitStack() as held:
        port = held.enter_context(reserved_port(config.frontend.host, config.frontend.port))
        folder = held.enter_context(cluster_folder())
        config = placed(config, port, folder)
        json_logs = config.runtime.log_format == "json"
        writer = LogWriter(sys.stderr.buffer, b"" if json_logs else prefix("supervisor", parts_of(config)))
        held.callback(writer.close)
        configure_logging(config.runtime, "supervisor", writer, secrets=secrets_of(config))
        check(config)
        finish = asyncio.run(Serving(config, writer, began, folder.restarted).run())
    if finish.code:
        print(f"headwater: error: {finish.reason}", file=sys.stderr)
    return finish.code


def check(config: ServeConfig) -> None:
    """What only this verb can refuse, or should warn of."""
    frontend = config.frontend
    if (config.runtime.registry or "").startswith("memory:"):
        raise ConfigError(
            "--registry memory: the parts are processes and would not see each other", hint="leave it out"
        )
    _check_memory(config)
    for url in config.engine.attach:
        http_url("--attach", url)
    check_public(config)
    check_keyring(frontend)
    open_tls(frontend)
    if is_loopback(frontend.host):
        return
    if not frontend.api_key and frontend.keys is None:
        _log.warning("listening on %s without API keys: whoever reaches this host can use it", frontend.host)
    if frontend.tls_cert is None:
        _log.warning("%s is reached by others, and keys and prompts travel in clear: see --tls-cert", frontend.host)


def _check_memory(config: ServeConfig) -> None:
    """A slip in a number must not bring the host down."""
    try:
        free_bytes = free_memory_bytes()
    except ConfigError:
        return  # this system does not tell
    least_bytes = (config.workers + config.frontends) * _PROCESS_BYTES
    if least_bytes > free_bytes:
        raise ConfigError(
            f"--workers {config.workers} and --frontends {config.frontends} take at least {about_bytes(least_bytes)}, "
            f"and {about_bytes(free_bytes)} are free",
            hint="take fewer, or start workers on more hosts",
        )


def _store_placed(config: KvConfig, folder: Path) -> KvConfig:
    """What is said of a KV store can be had, and a store of this graph listens at a place of its own. Who says nothing
    of one does not wait for its code to be loaded."""
    if config == KvConfig():
        return config
    from headwater.kv.node.server import check_free
    from headwater.tiers.node import node_options

    node_options(config)
    if not config.own_store:
        return config
    if config.kv_socket is None:
        return msgspec.structs.replace(config, kv_socket=str(folder / SOCKET_NAME))
    check_free(Path(config.kv_socket).expanduser())
    return config


def placed(config: ServeConfig, port: int, folder: ClusterFolder) -> ServeConfig:
    """The configuration with what was left open filled in, and the graph announced to `headwater status`."""
    registry = config.runtime.registry or (folder.path / "registry").as_uri()
    cert = str(Path(config.frontend.tls_cert).absolute()) if config.frontend.tls_cert else ""
    key = config.frontend.operator_key or secrets.token_urlsafe(32)
    url = base_url(config.frontend.host, port, tls=bool(cert))
    config = msgspec.structs.replace(config, workers=len(config.engine.attach) or num_workers(config))
    kv = _store_placed(config.kv, folder.path)
    socket = store_socket(kv) if kv.own_store else None
    store = str(socket.absolute()) if socket else ""
    folder.publish(
        ClusterRecord(pid=os.getpid(), url=url, registry=registry, started=time.time(), key=key, cert=cert, store=store)
    )
    return msgspec.structs.replace(
        config,
        kv=kv,
        frontend=msgspec.structs.replace(config.frontend, port=port, operator_key=key),
        runtime=msgspec.structs.replace(config.runtime, registry=registry),
    )


class Serving:
    """One run of the verb."""

    def __init__(
        self, config: ServeConfig, writer: LogWriter, began: float, on_restarted: Callable[[str | None], None]
    ) -> None:
        self._config = config
        self._began = began
        frontend = config.frontend
        self._url = base_url(frontend.host, frontend.port, tls=frontend.tls_cert is not None)
        self._instances: list[Instance] = []
        json_logs = config.runtime.log_format == "json"
        console = Console(stderr=True)
        live_on = console if console.is_terminal and not json_logs else None
        self._display = ServeDisplay(
            writer, parts_of(config), self._print_ready, on_restarted, json_logs=json_logs, live_on=live_on
        )

    async def run(self) -> Finish:
        supervisor = LocalSupervisor(self._config, self._display, check_serving=self._until_serving)
        try:
            return await supervisor.run()
        finally:
            self._display.stop_live()

    async def _until_serving(self) -> None:
        """Ask as a client would. The supervisor bounds the wait."""
        enough = threading.Event()
        try:
            frontend = self._config.frontend
            if frontend.tls_client_ca is None:  # else: it would want a certificate that we do not have
                cert = frontend.tls_cert or ""
                server = Server(self._url, frontend.operator_key, _POLL_TIMEOUT_S, pinned_cert=cert)
                await asyncio.to_thread(poll, server, self._config.frontends, enough)
        finally:
            enough.set()
        self._instances = await _instances(self._config)

    def _print_ready(self) -> None:
        print_ready(sys.stdout, self._config, self._url, self._instances, time.monotonic() - self._began)
        sys.stdout.flush()


def poll(server: Server, num_frontends: int, enough: threading.Event) -> None:
    """Until all frontends can serve; those that do not follow the first one in time are not waited for.

    They share a port, so each question may be answered by any of them.
    """
    ready: set[str] = set()
    deadline = math.inf
    while not enough.is_set() and len(ready) < num_frontends and time.monotonic() < deadline:
        name = _ready_frontend(server)
        if name is not None and not ready:
            deadline = time.monotonic() + _POLL_TIMEOUT_S
        if name is None or name in ready:
            enough.wait(_POLL_S)
        else:
            ready.add(name)


def _ready_frontend(server: Server) -> str | None:
    """The name of whoever answers, if it can serve."""
    try:
        document = server.get_json("/debug/cluster")
    except HeadwaterError:
        return None
    return str(document["frontend"]["id"]) if any(model["ready"] for model in document["models"]) else None


async def _instances(config: ServeConfig) -> list[Instance]:
    """For the closing table alone: what is not known in time is left out, and serving goes on.

    A worker reports ready a moment before its record says so.
    """
    registry = open_registry(config.runtime.registry or "")
    found: list[Instance] = []
    with suppress(HeadwaterError, OSError, TimeoutError):
        async with asyncio.timeout(_POLL_TIMEOUT_S):
            found = await registry.instances()
            while any(instance.state == "starting" for instance in found):
                await asyncio.sleep(_POLL_S)
                found = await registry.instances()
    await registry.close()
    return found
