"""Which server the client verbs (`chat`, `status`) talk to.

`--url` says it; a configured port says it; else it is the newest cluster of this user on this host; else the default
address.
"""

import argparse

from headwater.cli.flags import add_config_flags, load_from
from headwater.cli.http import Server
from headwater.config.load import LoadedConfig
from headwater.deploy.clusters import running_clusters
from headwater.deploy.ports import base_url


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="base URL of the server; default: what runs here")
    add_config_flags(parser, names=("host", "port", "api_key", "registry", "log_level"))


def server_of(args: argparse.Namespace, timeout_s: float) -> Server:
    loaded = load_from(args)
    keys = loaded.config.frontend.api_key
    return Server(args.url or _url(loaded), keys[0] if keys else None, timeout_s)


def _url(loaded: LoadedConfig) -> str:
    frontend = loaded.config.frontend
    configured = any(loaded.origins[key].layer != "default" for key in ("frontend.host", "frontend.port"))
    clusters = [] if configured and frontend.port else running_clusters()
    return clusters[0].url if clusters else base_url(frontend.host, frontend.port)
