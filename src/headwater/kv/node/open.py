"""From what an operator says to a store that runs: which tiers a node has, and the process that serves them."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from headwater.clock import Clock, RealClock
from headwater.config.units import parse_bytes
from headwater.errors import ConfigError
from headwater.kv.admission import AdmissionName, make_admission
from headwater.kv.node.peering import Peering, PeeringOptions
from headwater.kv.node.prices import NodePrices
from headwater.kv.node.server import Server
from headwater.kv.node.store import NodeStore
from headwater.kv.node.traces import Traces
from headwater.kv.shares import Limits
from headwater.kv.stores.base import TierStore
from headwater.kv.stores.disk import DiskOptions, DiskTier
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.ledgered import TierOptions
from headwater.kv.stores.quantized import QuantizedTier
from headwater.types import Tier

logger = logging.getLogger(__name__)

ColdFormat = Literal["exact", "int8"]


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """`host` is always there: what comes from below passes through it."""

    host: TierOptions = field(default_factory=lambda: TierOptions(1 << 30))
    disk: DiskOptions | None = None
    peering: PeeringOptions = field(default_factory=PeeringOptions)
    object_url: str = ""
    object_setting: str = "--object"
    """Where a person has set that."""
    owner: str = ""
    """Of what this node writes to an object store: the same over restarts, another on each node; none: the host's
    name."""
    admission: AdmissionName = "second-use"
    cold_format: ColdFormat = "exact"
    """How disk and object tier keep blocks; `int8` is smaller and lossy: `headwater.kv.stores.quantized`."""


def parse_disk(text: str) -> tuple[Path, int]:
    """`/folder:50GiB`. Raises `ConfigError`."""
    folder, colon, size = text.rpartition(":")
    try:
        if not colon or not folder:
            raise ValueError("no size")
        return Path(folder).expanduser().absolute(), parse_bytes(size)
    except ValueError as error:
        raise ConfigError(f"a disk tier is given as /folder:50GiB, not {text!r}: {error}") from None


def open_store(options: NodeOptions, clock: Clock, peers: TierStore | None = None) -> NodeStore:
    """On the event loop that will drive it. Raises `ConfigError`; no files are open then."""
    prices = NodePrices()
    host = HostTier(options.host, clock, prices.worth)
    lower: list[TierStore] = []
    limits: Limits = {}
    disk: DiskTier | None = None
    if options.disk is not None:
        disk = DiskTier(options.disk, clock, prices.worth)
        logger.info(
            "disk tier %s: %d blocks found in %.1f s", options.disk.folder, disk.ledger.table.num_blocks, disk.reopen_s
        )
        lower.append(_cold(disk, options.cold_format))
        limits = disk.limits()
    if peers is not None:
        lower.append(peers)
    if options.object_url:
        try:
            lower.append(_cold(_open_object(options, clock), options.cold_format))
        except ConfigError:
            if disk is not None:
                disk.abandon()
            raise
    for tier in (host, *lower):
        for tenant, fraction in limits.items():
            tier.limit(tenant, fraction)
    written: list[Tier] = ["disk", "object"]
    admissions = {name: make_admission(options.admission) for name in written}
    return NodeStore(host, lower, admissions, prices, clock)


def _cold(tier: TierStore, cold_format: ColdFormat) -> TierStore:
    return QuantizedTier(tier) if cold_format == "int8" else tier


def _open_object(options: NodeOptions, clock: Clock) -> TierStore:
    try:
        from headwater.kv.stores.object.options import parse_object_url
        from headwater.kv.stores.object.tier import ObjectTier
    except ModuleNotFoundError as error:
        raise ConfigError(f"an object tier needs {error.name}", hint='pip install "headwater[object]"') from None
    owner = options.owner or socket.gethostname()
    place = parse_object_url(options.object_url, owner=owner, setting=options.object_setting)
    return ObjectTier(replace(place, shares=options.host.shares), clock=clock)


async def serve_store(options: NodeOptions, path: Path, on_ready: Callable[[], None]) -> None:
    """Until the process is told to end. Raises `ConfigError`, and leaves nothing behind then."""
    traces = Traces(path, options.disk.folder if options.disk is not None else None)
    try:
        await _serve(options, path, on_ready)
    except ConfigError:
        traces.remove()
        raise


async def _serve(options: NodeOptions, path: Path, on_ready: Callable[[], None]) -> None:
    clock = RealClock()
    peering = Peering(options.peering, clock)
    store = open_store(options, clock, peering.tier)
    server = Server(store, path, clock)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        store.start()
        await peering.start(store.host)
        server.start()
        on_ready()
        await stop.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError):
                loop.remove_signal_handler(number)
        await server.close()
        await peering.close()
        await store.close()
