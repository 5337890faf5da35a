"""Keys, quotas and accounts of one frontend, put together from the configuration and kept in step with the world.

Every second or so the meter and the ledger exchange their news, in a thread; the keyring is watched. A ledger that
cannot be written stops nobody: quotas go by what was last known, and the news is told again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from headwater.clock import Clock
from headwater.config.schema import FrontendConfig, ServeConfig
from headwater.errors import ConfigError
from headwater.frontend.tenants.audit import AuditLog
from headwater.frontend.tenants.gate import Gate
from headwater.frontend.tenants.keyring import Keyring
from headwater.frontend.tenants.ledger import Ledger, MemoryLedger, SqliteLedger, ledger_beside
from headwater.frontend.tenants.line_log import LineLog
from headwater.frontend.tenants.meter import Meter
from headwater.frontend.tenants.source import CommandSource, FileSource, KeySource, open_source
from headwater.frontend.tenants.watch import KeyringWatch, read_keyring
from headwater.runtime.loopback import is_loopback

logger = logging.getLogger(__name__)

_LEDGER_INTERVAL_S = 1.0


def check_public(config: ServeConfig) -> None:
    """Raises `ConfigError` for a port that other hosts reach and that asks for no key."""
    frontend = config.frontend
    keyed = bool(frontend.api_key) or frontend.keys is not None
    if not keyed and not config.runtime.insecure and not is_loopback(frontend.host):
        raise ConfigError(
            f"--host {frontend.host} is reached by others, and no API key is asked for",
            hint="--keys FILE (`headwater keys create`), --api-key @FILE, or --insecure on a network you trust",
        )


def check_keyring(config: FrontendConfig) -> None:
    """Raises `ConfigError` for a keyring that a frontend would not begin with. The program that prints one is for
    frontends alone to run: it may be slow, be counted, or say something once."""
    if config.keys is None or not isinstance(_open_source(config.keys), CommandSource):
        _check_account(config, *_open_keyring(config))


class Tenancy:
    """Opened in the constructor, which raises `ConfigError`; `start` and `close` on the loop."""

    def __init__(self, config: FrontendConfig, frontend_id: str, clock: Clock, *, public: bool) -> None:
        source, self._keyring = _open_keyring(config)
        self.gate = Gate(
            config.api_key,
            clock,
            keyring=self._keyring if source is not None else None,
            public=public,
            trust_tenant_header=config.trust_tenant_header,
            operator_key=config.operator_key,
        )
        self.meter = Meter(frontend_id, self.gate.tenant, clock)
        self.usage = LineLog(Path(config.usage_log), clock) if config.usage_log else None
        self._audit_lines = LineLog(Path(config.audit_log), clock) if config.audit_log else None
        self.audit = AuditLog(self._audit_lines, frontend_id, clock)
        self._ledger = _open_ledger(config, source, self._keyring)
        self._watch = KeyringWatch(source, self._keyring, self._changed) if source is not None else None
        self._task: asyncio.Task[None] | None = None
        self._complained = False
        self._keys = f"{len(config.api_key)} plain keys, keyring {source.name if source is not None else 'none'}"

    @property
    def weights(self) -> Mapping[str, float]:
        """Shares of tenants in line, as they are at the moment."""
        return _Weights(self.gate)

    def start(self) -> None:
        self.audit.started(self._keys)
        if self._watch is not None:
            self._watch.start()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Tell the ledger the rest. Idempotent."""
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        if self._watch is not None:
            await self._watch.close()
        await self.exchange()
        self.audit.stopped()
        await asyncio.to_thread(self._close_files)

    async def exchange(self) -> None:
        """News to the ledger and back."""
        entry = self.meter.entry()
        try:
            standing = await asyncio.to_thread(self._ledger.sync, entry)
        except OSError as error:
            self.meter.failed(entry)
            if not self._complained:
                logger.error("%s; quotas go by what was last known", error)
            self._complained = True
            return
        self._complained = False
        self.meter.apply(entry, standing)

    async def _run(self) -> None:
        while True:
            exchange = asyncio.ensure_future(self.exchange())
            try:
                await asyncio.shield(exchange)
            except asyncio.CancelledError:
                await exchange
                raise
            await asyncio.sleep(_LEDGER_INTERVAL_S)

    def _changed(self, keyring: Keyring) -> None:
        self.audit.keyring(self._keyring, keyring)
        self._keyring = keyring
        self.gate.load(keyring)

    def _close_files(self) -> None:
        for log in (self.usage, self._audit_lines):
            if log is not None:
                log.close()
        self._ledger.close()


class _Weights(Mapping[str, float]):
    """Of those tenants that somebody asks for: whoever is not in the keyring weighs 1."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __getitem__(self, name: str) -> float:
        return self._gate.tenant(name).weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._gate.tenant_names())

    def __len__(self) -> int:
        return len(self._gate.tenant_names())


def _open_keyring(config: FrontendConfig) -> tuple[KeySource | None, Keyring]:
    if config.keys is None:
        return None, Keyring.empty()
    source = _open_source(config.keys)
    with _about_keys():
        return source, read_keyring(source)


def _open_source(keys: str) -> KeySource:
    with _about_keys():
        return open_source(keys)


@contextlib.contextmanager
def _about_keys() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"--keys: {error.message}", hint=error.hint) from error


def _open_ledger(config: FrontendConfig, source: KeySource | None, keyring: Keyring) -> Ledger:
    _check_account(config, source, keyring)
    if config.tenant_ledger is not None:
        return SqliteLedger(Path(config.tenant_ledger).expanduser())
    if isinstance(source, FileSource):
        return SqliteLedger(ledger_beside(source.path))
    return MemoryLedger()


def _check_account(config: FrontendConfig, source: KeySource | None, keyring: Keyring) -> None:
    if keyring.has_quotas and config.tenant_ledger is None and not isinstance(source, FileSource):
        raise ConfigError(
            "--keys: tenants have quotas, and there is no file to keep account in",
            hint="--tenant-ledger /var/lib/headwater/ledger, a file on a local disk",
        )
