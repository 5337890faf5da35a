"""Values that speak of the same thing and differ: refused, so that none of them silently wins.

What is left out is no word against anything; what a file says counts like a flag. Checked by the verb that obeys them:
one file serves all parts, and says things that are not for each of them.
"""

from collections.abc import Sequence
from typing import Any

from headwater.config.fields import fields_of
from headwater.config.load import LoadedConfig
from headwater.config.schema import KvConfig
from headwater.config.values import spell
from headwater.errors import ConfigError


def check_engine(loaded: LoadedConfig) -> None:
    """Of one engine. Raises `ConfigError`."""
    engine = loaded.config.engine
    if engine.num_kv_blocks is not None and engine.kv_cache_memory is not None:
        raise _conflict(loaded, "num_kv_blocks", "kv_cache_memory", "say how much KV there is in one way")
    if engine.attach and engine.engine != "attached" and _is_given(loaded, "engine"):
        raise _conflict(
            loaded, "engine", "attach", "--engine attached, or nothing; --attach-as says which kind of server it is"
        )
    num_keys, num_servers = len(engine.attach_api_key), len(engine.attach)
    if num_servers and num_keys > 1 and num_keys != num_servers:
        raise ConfigError(
            f"--attach-api-key says {num_keys} keys for {num_servers} servers", hint="one for all, or one for each"
        )
    if num_servers and len(engine.attach_kv_events) not in (0, num_servers):
        raise ConfigError(
            f"--attach-kv-events says {len(engine.attach_kv_events)} places for {num_servers} servers",
            hint="one for each, in their order",
        )


def check_worker(loaded: LoadedConfig) -> None:
    """Of a worker by itself. Raises `ConfigError`."""
    check_engine(loaded)
    num_servers = len(loaded.config.engine.attach)
    if num_servers > 1:
        raise ConfigError(
            f"{_said(loaded, 'attach')}: one worker attaches to one server, not to {num_servers}",
            hint="start a worker for each, or `headwater serve`",
        )


def check_graph(loaded: LoadedConfig) -> None:
    """Of all workers that `serve` starts. Raises `ConfigError`."""
    check_engine(loaded)
    _check_store(loaded)
    config = loaded.config
    _check_servers_differ(config.engine.attach)
    num_servers, num_in_pools = len(config.engine.attach), config.prefill + config.decode
    if num_servers and num_servers < num_in_pools:
        raise ConfigError(
            f"{_pools(loaded)} are {num_in_pools} workers, and {_said(loaded, 'attach')} are {num_servers}: one each",
            hint="attach a server for each worker of the pools",
        )
    meant = num_servers or num_in_pools
    if meant and _is_given(loaded, "workers") and config.workers != meant:
        source = _said(loaded, "attach") if num_servers else _pools(loaded)
        raise ConfigError(
            f"{_said(loaded, 'workers')} does not go with {source}, which makes {meant}",
            hint=f"leave --workers out, or say --workers {meant}",
        )
    role = config.disaggregation.role
    if num_in_pools and num_servers <= num_in_pools and role != "adaptive" and _is_given(loaded, "role"):
        raise ConfigError(
            f"{_said(loaded, 'role')} does not go with {_pools(loaded)}: every worker has its role from a pool",
            hint="leave one of them out; --role adaptive goes with pools",
        )


def _check_servers_differ(urls: Sequence[str]) -> None:
    """Two workers of one server would each believe to have the whole of it."""
    places = [url.rstrip("/").removesuffix("/v1") for url in urls]
    for place in places:
        if places.count(place) > 1:
            shown = place.rpartition("@")[2]  # without a password, which is refused later
            raise ConfigError(f"--attach names {shown} {places.count(place)} times", hint="one worker uses all of it")


def _check_store(loaded: LoadedConfig) -> None:
    """Of a KV store that no worker of the graph could use."""
    said = [_said(loaded, name) for name in KvConfig.__struct_fields__ if _is_given(loaded, name)]
    if said and loaded.config.engine.attach:
        raise ConfigError(
            f"{', '.join(said)} does not go with {_said(loaded, 'attach')}: a server that runs already keeps its KV "
            "blocks where it was told to",
            hint="start the server with the store's connector and run `headwater kv serve` beside it, or run its "
            "engine in the workers (--engine)",
        )


def _conflict(loaded: LoadedConfig, one: str, other: str, hint: str) -> ConfigError:
    return ConfigError(f"{_said(loaded, one)} does not go with {_said(loaded, other)}", hint=hint)


def _is_given(loaded: LoadedConfig, name: str) -> bool:
    return loaded.origins[fields_of()[name].key].layer != "default"


def _pools(loaded: LoadedConfig) -> str:
    return " ".join(_said(loaded, name) for name in ("prefill", "decode") if _is_given(loaded, name))


def _said(loaded: LoadedConfig, name: str) -> str:
    """The value as it could be said, and where it was if not by a flag."""
    field = fields_of()[name]
    owner: Any = getattr(loaded.config, field.section) if field.section else loaded.config
    origin = loaded.origins[field.key]
    text = f"{field.flag} {spell(field, getattr(owner, name))}"
    return text if origin.layer == "flag" else f"{text} ({origin})"
