"""What tenants took, over restarts and over the frontends of a host.

Each frontend keeps its own account and, about once a second, adds to the ledger what is new, tells how many requests
it has in progress, and learns what all of them together have. So quotas hold over frontends with a delay of a second,
and a crash loses at most the last one. `SqliteLedger` is a file on a local disk; frontends of other hosts need a
ledger of their own, and then a quota holds per host.
"""

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headwater.errors import ConfigError

logger = logging.getLogger(__name__)

_BUSY_TIMEOUT_S = 5.0
_PRESENT_S = 5.0
"""A frontend not heard from for so long has nothing in progress."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    tenant TEXT NOT NULL, month TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0, accelerator_ms REAL NOT NULL DEFAULT 0,
    requests INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, month)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS presence (
    frontend TEXT NOT NULL, tenant TEXT NOT NULL, in_progress INTEGER NOT NULL, heard REAL NOT NULL,
    PRIMARY KEY (frontend, tenant)) WITHOUT ROWID;
"""


@dataclass(slots=True)
class Usage:
    """Sums."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    accelerator_ms: float = 0.0
    requests: int = 0
    """That a worker was given."""

    @property
    def tokens(self) -> int:
        """What quotas count."""
        return self.prompt_tokens + self.output_tokens

    def add(self, other: "Usage") -> None:
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.accelerator_ms += other.accelerator_ms
        self.requests += other.requests


@dataclass(frozen=True, slots=True)
class Entry:
    """One frontend's news about itself."""

    frontend: str
    month: str
    """`2026-11`, in UTC."""
    epoch: float
    added: Mapping[str, Usage] = field(default_factory=dict[str, Usage])
    in_progress: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Standing:
    """What all frontends together have."""

    month: dict[str, Usage]
    others_in_progress: dict[str, int]


class Ledger(Protocol):
    def sync(self, entry: Entry) -> Standing:
        """All of `entry` is kept, or none of it and `OSError` is raised. May block."""
        ...

    def close(self) -> None: ...


class MemoryLedger:
    """For as long as it lives; frontends of one process may share it."""

    def __init__(self) -> None:
        self._usage: dict[tuple[str, str], Usage] = {}
        self._present: dict[str, tuple[float, dict[str, int]]] = {}

    def sync(self, entry: Entry) -> Standing:
        for tenant, usage in entry.added.items():
            self._usage.setdefault((tenant, entry.month), Usage()).add(usage)
        self._present[entry.frontend] = (entry.epoch, dict(entry.in_progress))
        month = {
            tenant: Usage(u.prompt_tokens, u.cached_tokens, u.output_tokens, u.accelerator_ms, u.requests)
            for (tenant, of), u in self._usage.items()
            if of == entry.month
        }
        others: dict[str, int] = {}
        for frontend, (heard, counts) in self._present.items():
            if frontend != entry.frontend and entry.epoch - heard < _PRESENT_S:
                for tenant, count in counts.items():
                    others[tenant] = others.get(tenant, 0) + count
        return Standing(month, others)

    def close(self) -> None:
        """Nothing is held."""


def ledger_beside(keyring: Path) -> Path:
    """Where the ledger is unless it was said."""
    return keyring.with_name(f"{keyring.name}.ledger")


class SqliteLedger:
    """Used by one thread at a time. A file that was removed is begun anew by whichever frontend notices first, and
    opened by the others: what is written to the old one nobody would ever read."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError`."""
        self._path = path
        try:
            self._open()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"the ledger {path} cannot be used: {error}", hint="it must be a file on a local disk"
            ) from error

    def sync(self, entry: Entry) -> Standing:
        try:
            if self._file() != self._opened:
                self._database.close()
                self._open()
                logger.warning("the ledger %s was removed: a new one is begun", self._path)
            with self._transaction():
                self._write(entry)
                return self._read(entry)
        except sqlite3.Error as error:
            raise OSError(f"the ledger cannot be written: {error}") from error

    def totals(self) -> dict[str, dict[str, Usage]]:
        """By month and tenant."""
        rows = self._database.execute(
            "SELECT month, tenant, prompt_tokens, cached_tokens, output_tokens, accelerator_ms, requests FROM usage"
            " ORDER BY month, tenant"
        )
        found: dict[str, dict[str, Usage]] = {}
        for month, tenant, *numbers in rows:
            found.setdefault(month, {})[tenant] = Usage(*numbers)
        return found

    def close(self) -> None:
        self._database.close()

    def _open(self) -> None:
        self._path.touch(mode=0o600)
        file = self._file()
        self._database = sqlite3.connect(
            self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(_SCHEMA)
        self._opened = file

    def _file(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _write(self, entry: Entry) -> None:
        self._database.executemany(
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, month) DO UPDATE SET"
            " prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
            " cached_tokens = cached_tokens + excluded.cached_tokens,"
            " output_tokens = output_tokens + excluded.output_tokens,"
            " accelerator_ms = accelerator_ms + excluded.accelerator_ms, requests = requests + excluded.requests",
            [
                (name, entry.month, u.prompt_tokens, u.cached_tokens, u.output_tokens, u.accelerator_ms, u.requests)
                for name, u in entry.added.items()
            ],
        )
        self._database.execute(
            "DELETE FROM presence WHERE frontend = ? OR heard < ?", (entry.frontend, entry.epoch - _PRESENT_S)
        )
        self._database.executemany(
            "INSERT INTO presence VALUES (?, ?, ?, ?)",
            [(entry.frontend, name, count, entry.epoch) for name, count in entry.in_progress.items() if count],
        )

    def _read(self, entry: Entry) -> Standing:
        month = {
            name: Usage(*numbers)
            for name, *numbers in self._database.execute(
                "SELECT tenant, prompt_tokens, cached_tokens, output_tokens, accelerator_ms, requests FROM usage"
                " WHERE month = ?",
                (entry.month,),
            )
        }
        others = dict(
            self._database.execute(
                "SELECT tenant, SUM(in_progress) FROM presence WHERE frontend != ? GROUP BY tenant", (entry.frontend,)
            ).fetchall()
        )
        return Standing(month, others)
