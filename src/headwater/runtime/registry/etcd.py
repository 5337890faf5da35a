"""Registry in etcd: for clusters of several hosts.

    <prefix>/instances/<worker id>    JSON of the instance, under the lease of its worker
    <prefix>/models/<name, quoted>    JSON of the catalogue's entry, without a lease

A worker's lease is renewed three times in its time. While etcd cannot be reached the last picture is kept, and for a
while after that as well: leases may have run out meanwhile, and whoever lives registers again. A store that was wiped
gets its models back from whoever knew them.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, quote, unquote

import msgspec

from headwater.errors import ConfigError, HeadwaterError, Unavailable
from headwater.protocol.cluster import CatalogueEntry, Instance
from headwater.runtime.registry.base import (
    InstanceGone,
    InstancePut,
    ModelGone,
    ModelPut,
    Outage,
    RegistryEvent,
    Synced,
)
from headwater.runtime.registry.etcd_gateway import Compacted, Entry, Gateway, Listing, Login
from headwater.runtime.registry.feed import Feed
from headwater.runtime.registry.records import MAX_RECORD_BYTES, check_model_name, decode_instance, encode_instance

_log = logging.getLogger(__name__)

_INSTANCES = "instances/"
_MODELS = "models/"
_TTL_S = 5.0
_RETRY_S = 0.5
_PING_S = 1.0
"""A watch that says nothing for so long is asked whether etcd still lives."""
_CLOSE_S = 2.0
_LOGIN_OPTIONS = ("user", "password-file")
_TLS_OPTIONS = ("ca", "cert", "key")


class EtcdLease:
    """Ownership of one instance record, kept up by a task of its own."""

    def __init__(self, registry: "EtcdRegistry", instance: Instance, data: bytes, lease: int) -> None:
        self._registry = registry
        self._gateway = registry.gateway
        self._worker_id = instance.worker_id
        self._key = _INSTANCES + instance.worker_id
        self._data = data
        self.lease = lease
        self._published = True
        self._conflicting = False
        self._released = False
        self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"lease of {self._worker_id}")

    async def update(self, instance: Instance) -> None:
        """A store out of reach gets the record when it is back."""
        if self._released:
            raise ConfigError(f"the lease of worker {self._worker_id} was released")
        if instance.worker_id != self._worker_id:
            raise ConfigError(f"the lease of worker {self._worker_id} cannot carry {instance.worker_id}")
        self._data, self._published = encode_instance(instance), False
        with contextlib.suppress(Unavailable):
            await self._publish()

    async def release(self) -> None:
        if not self._released:
            self.abandon()
            with contextlib.suppress(Unavailable):
                await self._gateway.revoke(self.lease)

    def abandon(self) -> None:
        """Renew it no more."""
        self._released = True
        self._task.cancel()

    async def _keep(self) -> None:
        pause_s = self._registry.ttl_s / 3
        while True:
            await asyncio.sleep(pause_s)
            try:
                if not await self._gateway.keep_alive(self.lease):
                    self.lease, self._published = await self._gateway.grant(self._registry.ttl_s), False
                    await self._registry.restore_models()
                if not self._published:
                    await self._publish()
                pause_s = self._registry.ttl_s / 3
            except Unavailable as error:
                _log.debug("lease of %s: %s", self._worker_id, error)
                pause_s = min(_RETRY_S, self._registry.ttl_s / 3)

    async def _publish(self) -> None:
        data = self._data
        ours = await self._gateway.replace(self._key, data, self.lease)
        ours = ours or await self._gateway.create(self._key, data, self.lease)
        if ours:
            self._published = data is self._data
        elif not self._conflicting:
            _log.error("worker id %s is held by another worker: waiting for it to leave", self._worker_id)
        self._conflicting = not ours


class EtcdRegistry:
    """One handle."""

    def __init__(self, gateway: Gateway, *, ttl_s: float = _TTL_S) -> None:
        self.gateway = gateway
        self.ttl_s = ttl_s
        self._feed = Feed()
        self._follower: asyncio.Task[None] | None = None
        self._leases: list[EtcdLease] = []
        self._own_models: dict[str, CatalogueEntry] = {}
        """Put by this handle."""
        self._closed = False
        self._revision = 0
        self._cluster_id = ""
        self._missing: dict[str, float] = {}
        """Instances that went while etcd was out of reach or shortly after: until when they may come back."""
        self._trusted_from = 0.0
        """When the end of an instance is news again."""
        self._unreachable = False

    async def register(self, instance: Instance) -> EtcdLease:
        self._check_open()
        data = encode_instance(instance)
        lease = await self.gateway.grant(self.ttl_s)
        if not await self.gateway.create(_INSTANCES + instance.worker_id, data, lease):
            await self.gateway.revoke(lease)
            raise ConfigError(f"worker id {instance.worker_id!r} is already held by a live worker")
        self._leases.append(EtcdLease(self, instance, data, lease))
        return self._leases[-1]

    async def instances(self) -> list[Instance]:
        self._check_open()
        events = [_event_of(entry) for entry in await self.gateway.get(_INSTANCES)]
        return [event.instance for event in events if isinstance(event, InstancePut)]

    async def models(self) -> list[CatalogueEntry]:
        self._check_open()
        events = [_event_of(entry) for entry in await self.gateway.get(_MODELS)]
        return [event.entry for event in events if isinstance(event, ModelPut)]

    async def put_model(self, entry: CatalogueEntry) -> None:
        check_model_name(entry.name)
        self._check_open()
        data = msgspec.json.encode(entry)
        if len(data) > MAX_RECORD_BYTES:
            raise ConfigError(
                f"the entry of model {entry.name} has {len(data):,} bytes; at most {MAX_RECORD_BYTES:,} fit"
            )
        await self.gateway.put(_model_key(entry.name), data)
        self._own_models[entry.name] = entry

    async def remove_model(self, name: str) -> None:
        self._check_open()
        self._own_models.pop(name, None)
        await self.gateway.delete(_model_key(name))

    async def restore_models(self) -> None:
        """A lease that was lost may mean that all was: put back what this handle put, if it is not there."""
        for name, entry in list(self._own_models.items()):
            await self.gateway.create(_model_key(name), msgspec.json.encode(entry))

    def watch(self) -> AsyncIterator[RegistryEvent]:
        if self._follower is None and not self._closed:
            self._follower = asyncio.get_running_loop().create_task(self._follow(), name="etcd watch")
        return self._feed.watch()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._feed.end()
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*(lease.release() for lease in self._leases), return_exceptions=True)
        await self.gateway.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("the registry handle is closed")

    # Following

    async def _follow(self) -> None:
        while True:
            try:
                await self._adopt(await self.gateway.list_all())
                self._tell_outage("")
                await self._follow_changes()
            except Compacted:
                continue
            except HeadwaterError as error:
                self._tell_outage(error.message)
                await asyncio.sleep(_RETRY_S)

    async def _follow_changes(self) -> None:
        changes = self.gateway.changes(self._revision + 1)
        reading: asyncio.Future[tuple[int, list[Entry]]] | None = None
        try:
            while True:
                reading = reading or asyncio.ensure_future(_next(changes))
                done, _ = await asyncio.wait([reading], timeout=min(_PING_S, self.ttl_s / 2))
                self._forget_missing()
                if not done:
                    await self.gateway.ping()
                    continue
                self._revision, entries = reading.result()
                reading = None
                for entry in entries:
                    self._apply(entry)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            await changes.aclose()  # type: ignore[attr-defined]

    async def _adopt(self, listing: Listing) -> None:
        """A whole picture in place of what is known, which may be long ago."""
        wiped = self._revision and (listing.revision < self._revision or listing.cluster_id != self._cluster_id)
        self._revision, self._cluster_id = listing.revision, listing.cluster_id
        found = {entry.key for entry in listing.entries}
        for entry in listing.entries:
            self._apply(entry)
        for worker_id in list(self._feed.instances):
            if _INSTANCES + worker_id not in found:
                self._apply(Entry(_INSTANCES + worker_id, None))
        for name, model in list(self._feed.models.items()):
            if _model_key(name) in found:
                continue
            if wiped:
                await self.gateway.create(_model_key(name), msgspec.json.encode(model))
            else:
                self._feed.apply([ModelGone(name)])
        self._feed.apply([Synced()])

    def _apply(self, entry: Entry) -> None:
        event = _event_of(entry)
        if isinstance(event, InstancePut):
            self._missing.pop(event.instance.worker_id, None)
        elif isinstance(event, InstanceGone) and time.monotonic() < self._trusted_from:
            self._missing.setdefault(event.worker_id, self._trusted_from)
            return
        if event is not None:
            self._feed.apply([event])

    def _forget_missing(self) -> None:
        """Those that had time enough to register again."""
        now = time.monotonic()
        for worker_id in [name for name, until in self._missing.items() if until <= now]:
            del self._missing[worker_id]
            self._feed.apply([InstanceGone(worker_id)])

    def _tell_outage(self, reason: str) -> None:
        """Report changes only."""
        if bool(reason) == self._unreachable:
            return
        self._unreachable = bool(reason)
        self._trusted_from = time.monotonic() + 2 * self.ttl_s if not reason else float("inf")
        if reason:
            _log.warning("registry outage, keeping the last picture: %s", reason)
        else:
            self._missing = dict.fromkeys(self._missing, self._trusted_from)
            _log.info("etcd at %s is back", self.gateway.address)
        self._feed.apply([Outage(reachable=not reason, reason=reason)])


def open_etcd(parts: SplitResult) -> EtcdRegistry:
    """`etcd://host:2379,host2:2379/prefix`, or `etcds://` with `?ca=FILE&cert=FILE&key=FILE` for TLS; either with
    `?user=NAME&password-file=FILE` where etcd asks who is there."""
    hosts = [host for host in parts.netloc.split(",") if host]
    prefix = unquote(parts.path).strip("/") or "headwater"
    if not hosts or any("@" in host for host in hosts) or not prefix.isprintable():
        raise ConfigError(f"registry {parts.geturl()!r} names no etcd", hint="etcd://host:2379/headwater")
    options = _options(parts)
    tls = _tls(parts.netloc, options) if parts.scheme == "etcds" else None
    scheme = "http" if tls is None else "https"
    endpoints = [f"{scheme}://{host if host.rpartition(':')[2].isdigit() else host + ':2379'}" for host in hosts]
    return EtcdRegistry(Gateway(endpoints, prefix + "/", tls, _login(options)))


def _options(parts: SplitResult) -> dict[str, str]:
    known = [*_LOGIN_OPTIONS, *(_TLS_OPTIONS if parts.scheme == "etcds" else ())]
    options = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    unknown = options.keys() - set(known)
    if unknown:
        raise ConfigError(f"registry option {min(unknown)!r} is unknown", hint=f"there are {', '.join(known)}")
    return options


def _login(options: Mapping[str, str]) -> Login | None:
    user, password_file = (options.get(name) for name in _LOGIN_OPTIONS)
    if not user and not password_file:
        return None
    if not user or not password_file:
        raise ConfigError("the registry's user and password-file go together", hint="?user=NAME&password-file=FILE")
    return Login(user, Path(password_file).expanduser())


def _tls(netloc: str, options: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            context.load_cert_chain(options["cert"], options.get("key"))
    except OSError as error:
        raise ConfigError(f"the certificates of registry {netloc} cannot be read: {error}") from error
    return context


def _model_key(name: str) -> str:
    return _MODELS + quote(name, safe="")


def _event_of(entry: Entry) -> RegistryEvent | None:
    """None for what is not ours or cannot be understood."""
    try:
        if entry.key.startswith(_INSTANCES):
            worker_id = entry.key.removeprefix(_INSTANCES)
            if entry.value is None:
                return InstanceGone(worker_id)
            return InstancePut(decode_instance(entry.value, worker_id))
        if entry.key.startswith(_MODELS):
            name = unquote(entry.key.removeprefix(_MODELS))
            if entry.value is None:
                return ModelGone(name)
            return ModelPut(msgspec.json.decode(entry.value, type=CatalogueEntry))
    except ValueError as error:
        _log.warning("ignoring registry record %s: %s", entry.key, error)
    return None


async def _next(changes: AsyncIterator[tuple[int, list[Entry]]]) -> tuple[int, list[Entry]]:
    return await anext(changes)
