"""`headwater status`: the workers of a running cluster, from a frontend, or from the registry when no frontend answers.

Exit code 0 when some model can be served, 1 when not.
"""

import argparse
import asyncio
import json
from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

from headwater.cli.console import open_console
from headwater.cli.flags import load_from
from headwater.cli.target import add_target, server_of
from headwater.deploy.clusters import running_clusters
from headwater.errors import Unavailable
from headwater.protocol.cluster import Instance
from headwater.runtime.registry.open import open_registry

_TIMEOUT_S = 10.0

Document = dict[str, Any]
"""As `/debug/cluster` of a frontend gives it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")
    add_target(parser)


def run(args: argparse.Namespace) -> int:
    document = look(args)
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        _print(document)
    return 0 if any(model["ready"] for model in document["models"]) else 1


def look(args: argparse.Namespace) -> Document:
    """Raises `Unavailable` when neither a frontend nor a registry is found."""
    server = server_of(args, _TIMEOUT_S)
    try:
        return {"source": server.url, **server.get_json("/debug/cluster")}
    except Unavailable:
        here = [cluster.registry for cluster in running_clusters() if args.pid in (None, cluster.pid)]
        url = load_from(args).config.runtime.registry or next(iter(here), None)
        if args.url or url is None:
            raise
        return asyncio.run(_from_registry(url))


async def _from_registry(url: str) -> Document:
    registry = open_registry(url)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            instances, catalogue = await registry.instances(), await registry.models()
    except TimeoutError as error:
        raise Unavailable(f"the registry {url} does not answer") from error
    finally:
        await registry.close()
    serving = {instance.card.name for instance in instances if instance.state == "ready"}
    names = sorted({entry.name for entry in catalogue} | {instance.card.name for instance in instances})
    seen = "no frontend answers; seen in the registry only"
    return {
        "source": url,
        "frontend": None,
        "models": [_unserved(name, seen if name in serving else "no worker") for name in names],
        "workers": [_worker(instance) for instance in instances],
    }


def _unserved(name: str, missing: str) -> Document:
    return {"name": name, "ready": False, "missing": missing}


def _worker(instance: Instance) -> Document:
    return {
        "worker_id": instance.worker_id,
        "model": instance.card.name,
        "role": instance.role,
        "state": instance.state,
        "engine": instance.engine,
        "host": instance.host,
        "pid": instance.pid,
        "kv_blocks": instance.kv_blocks,
        "load": None,
    }


_COLUMNS: dict[str, Callable[[Document], str]] = {
    "worker": lambda worker: str(worker["worker_id"]),
    "model": lambda worker: str(worker["model"]),
    "role": lambda worker: str(worker["role"]),
    "state": lambda worker: _state(worker),
    "running": lambda worker: _load(worker, "num_running"),
    "waiting": lambda worker: _load(worker, "num_waiting"),
    "KV used": lambda worker: f"{worker['load']['kv_usage']:.0%}" if worker.get("load") else "-",
    "hit rate": lambda worker: f"{worker['load']['prefix_hit_rate']:.0%}" if worker.get("load") else "-",
    "cache": lambda worker: {None: "-", True: "tells", False: "guessed"}[worker.get("kv_events")],
    "process": lambda worker: f"{worker['host']}:{worker['pid']}",
}


def _print(document: Document) -> None:
    console = open_console(highlight=False)
    console.print(f"{document['source']}: {_summary(document)}", soft_wrap=True, markup=False)
    for model in document["models"]:
        state = "ready" if model["ready"] else f"not ready: {model['missing']}"
        style = "green" if model["ready"] else "yellow"
        console.print(f"  {model['name']}: {state}", style=style, soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in _COLUMNS:
        table.add_column(title, no_wrap=title not in ("worker", "model"), overflow="fold")
    for worker in document["workers"]:
        table.add_row(*(Text(column(worker)) for column in _COLUMNS.values()))
    if document["workers"]:
        console.print(table)


def _summary(document: Document) -> str:
    frontend = document["frontend"]
    workers = f"{len(document['workers'])} workers"
    if frontend is None:
        return f"no frontend answers, {workers} in the registry"
    state = "draining" if frontend["draining"] else f"up {frontend['uptime_s']:.0f} s"
    return f"frontend {state}, {frontend['requests']} requests in progress, {workers}"


def _state(worker: Document) -> str:
    if not worker.get("connected", True):
        return f"{worker['state']}, not connected"
    return f"{worker['state']}, server away" if (worker.get("load") or {}).get("away") else str(worker["state"])


def _load(worker: Document, name: str) -> str:
    return str(worker["load"][name]) if worker.get("load") else "-"
