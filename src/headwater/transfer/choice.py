"""The back-ends that ship, by name, and those of others (entry points in the group `headwater.transfer_backends`)."""

from collections.abc import Sequence
from importlib import import_module
from typing import cast

from headwater.errors import ConfigError
from headwater.transfer.base import Backend

SHIPPED = {
    "shm": "headwater.transfer.backends.shm:SharedBackend",
    "cma": "headwater.transfer.backends.cma:CmaBackend",
    "cuda": "headwater.transfer.backends.cuda:CudaBackend",
    "nixl": "headwater.transfer.backends.nixl:NixlBackend",
    "tcp": "headwater.transfer.backends.tcp:TcpBackend",
    "file": "headwater.transfer.backends.file:FileBackend",
    "object": "headwater.transfer.backends.object:ObjectBackend",
}
GROUP = "headwater.transfer_backends"


def make_backends(names: Sequence[str]) -> list[Backend]:
    """New ones, in that order. Raises `ConfigError` for a name nobody offers."""
    return [_make(name) for name in names]


def _make(name: str) -> Backend:
    if name in SHIPPED:
        module, _, kind = SHIPPED[name].partition(":")
        return cast(Backend, getattr(import_module(module), kind)())
    from importlib.metadata import entry_points  # costs more than all of this package

    for found in entry_points(group=GROUP):
        if found.name == name:
            return cast(Backend, found.load()())
    raise ConfigError(f"no transfer back-end is called {name!r}; shipped are {', '.join(SHIPPED)}")
