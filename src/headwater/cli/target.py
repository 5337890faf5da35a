"""Which server the client verbs (`chat`, `status`, `drain`) talk to.

`--url` says it, or `--pid` of the `serve` that is meant; a configured port says it; else it is the newest cluster of
this user on this host; else the default address.
"""

import argparse
from contextlib import suppress

from headwater.cli.flags import add_config_flags, load_from
from headwater.cli.http import Server
from headwater.config.load import LoadedConfig
from headwater.deploy.clusters import ClusterRecord, running_clusters
from headwater.deploy.ports import base_url
from headwater.errors import HeadwaterError, Unavailable

_NAMES_TIMEOUT_S = 2.0


def add_target(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--url", help="base URL of the server; default: what runs here")
    which.add_argument("--pid", type=int, metavar="N", help="process id of the `headwater serve` that is meant")
    add_config_flags(parser, names=("host", "port", "api_key", "registry", "log_level"))


def server_of(args: argparse.Namespace, timeout_s: float) -> Server:
    loaded = load_from(args)
    frontend = loaded.config.frontend
    key = frontend.api_key[0] if frontend.api_key else None
    cluster = None if args.url else _cluster(loaded, args.pid)
    if cluster is not None:
        return _server(cluster, timeout_s, key)
    return Server(args.url or base_url(frontend.host, frontend.port), key, timeout_s)


def model_names() -> dict[str, list[str]]:
    """By fingerprint, the names under which the clusters of this host serve models; of those that answer."""
    found: dict[str, set[str]] = {}
    for cluster in running_clusters():
        with suppress(HeadwaterError):
            for model in _server(cluster, _NAMES_TIMEOUT_S).get_json("/debug/cluster")["models"]:
                found.setdefault(model["fingerprint"], set()).add(model["name"])
    return {fingerprint: sorted(names) for fingerprint, names in found.items()}


def _server(cluster: ClusterRecord, timeout_s: float, key: str | None = None) -> Server:
    return Server(cluster.url, key or cluster.key or None, timeout_s, pinned_cert=cluster.cert)


def _cluster(loaded: LoadedConfig, pid: int | None) -> ClusterRecord | None:
    """The one of this host that is meant, if any is."""
    if pid is not None:
        return running_cluster(pid)
    frontend = loaded.config.frontend
    configured = any(loaded.origins[key].layer != "default" for key in ("frontend.host", "frontend.port"))
    clusters = running_clusters()
    if configured and frontend.port:
        meant = base_url(frontend.host, frontend.port), base_url(frontend.host, frontend.port, tls=True)
        clusters = [cluster for cluster in clusters if cluster.url in meant]
    return clusters[0] if clusters else None


def running_cluster(pid: int | None) -> ClusterRecord:
    """The one of this host with that process id, or the newest. Raises `Unavailable`."""
    clusters = running_clusters()
    for cluster in clusters:
        if pid in (None, cluster.pid):
            return cluster
    which = "" if pid is None else f" with process id {pid}"
    others = ", ".join(str(cluster.pid) for cluster in clusters)
    hint = f"those that run here have {others}" if others else "start one with `headwater serve`"
    raise Unavailable(f"no `headwater serve`{which} runs here", hint=hint)
