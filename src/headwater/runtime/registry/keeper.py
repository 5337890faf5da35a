"""The thread behind a `file` registry handle: keeps own leases, watches others, does everything that may block.

It wakes on inotify, on commands and on a timer. The timer makes the truth independent of inotify; with many instances
it is stretched, up to a second, so that looking takes at most about 0.5 % of a core. A store out of reach is reported
once and tried again at every look; what this handle knows of is put back when it was wiped.
"""

import contextlib
import logging
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headwater.errors import ConfigError
from headwater.protocol.cluster import CatalogueEntry, Instance
from headwater.runtime.registry.base import Outage, RegistryEvent, Synced
from headwater.runtime.registry.catalogue import Catalogue
from headwater.runtime.registry.folder import Claim, Folder, Held
from headwater.runtime.registry.inotify import Inotify
from headwater.runtime.registry.scanner import Scanner

_log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25
AFTER_WAKE_S = 0.01
"""A dying owner's file is closed a moment before its lock is free: look again."""
MAX_LOOK_INTERVAL_S = 1.0
IDLE_SHARE = 0.005
"""Part of a core that timed looks may take, up to the longest interval."""
BUSY_SHARE = 0.2
"""Part of a core that looks may take while much changes."""
CLEAN_INTERVAL_S = 5.0
MEND_DELAY_S = 0.5
"""Time before what was wiped is put back: whoever removes a folder should get to the end of it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Command(Generic[T]):
    """Something to do on the thread, and who waits for it."""

    function: Callable[[], T]
    future: Future[T]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except Exception as error:  # noqa: BLE001 - handed to the caller
            self.future.set_exception(error)


class Keeper:
    """Owns every descriptor of one handle. `call` may be used from any thread, the rest runs on the keeper's own."""

    def __init__(self, folder: Folder, deliver: Callable[[list[RegistryEvent]], None]) -> None:
        self._folder = folder
        self._deliver = deliver
        self._commands: deque[_Command[Any]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._wake_lock = threading.Lock()
        self._inotify = Inotify.open()
        self._stopping = False
        self._ended = False
        self._scanner: Scanner | None = None
        self._claims: dict[str, Claim] = {}
        self._catalogue = Catalogue(folder)
        self._synced = False
        self._conflicts: set[str] = set()
        self._outage: str | None = None
        self._look_cost_s = 0.0
        self._last_look = -math.inf
        self._next_look = math.inf
        self._look_again = False
        self._next_clean = 0.0
        self._missing_since = math.inf
        self._thread = threading.Thread(target=self._run, name="headwater-registry", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the thread."""
        future: Future[T] = Future()
        with self._wake_lock:
            if self._ended:
                raise ConfigError("the registry handle is closed")
            self._commands.append(_Command(function, future))
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"w")
        return future

    # Commands

    def watch(self) -> None:
        """Begin to look and to deliver."""
        if self._scanner is None:
            self._scanner = Scanner(self._folder)
            self._next_look = 0.0
            self._folder.ensure()

    def instances(self) -> list[Instance]:
        scanner = Scanner(self._folder)
        try:
            self._folder.ensure()
            scanner.look()
            return scanner.instances
        finally:
            scanner.close()

    def models(self) -> list[CatalogueEntry]:
        self._folder.check()
        self._deliver_news(self._catalogue.look())
        return list(self._catalogue.models.values())

    def claim(self, worker_id: str, data: bytes) -> Claim:
        if worker_id in self._claims:
            raise ConfigError(f"worker id {worker_id!r} is already held by this process")
        claim = self._claims[worker_id] = self._folder.claim(worker_id, data)
        _close_after_fork(claim)
        self._look_within(LOOK_INTERVAL_S)
        return claim

    def update(self, claim: Claim, data: bytes) -> None:
        """A store out of reach gets the record when it is back."""
        if self._claims.get(claim.worker_id) is not claim:
            raise ConfigError(f"the lease of worker {claim.worker_id} was released")
        claim.data, claim.published = data, False
        try:
            self._keep(claim)
        except OSError as error:
            self._tell_outage(str(error))

    def drop(self, claim: Claim) -> None:
        if self._claims.get(claim.worker_id) is claim:
            del self._claims[claim.worker_id]
            self._folder.drop(claim)

    def put_model(self, entry: CatalogueEntry) -> None:
        self._deliver_news(self._catalogue.change(lambda models: models | {entry.name: entry}))
        self._look_within(LOOK_INTERVAL_S)

    def remove_model(self, name: str) -> None:
        self._deliver_news(
            self._catalogue.change(lambda models: {key: entry for key, entry in models.items() if key != name})
        )

    def stop(self) -> None:
        self._stopping = True
        for claim in list(self._claims.values()):
            with contextlib.suppress(OSError):
                self.drop(claim)

    # The loop

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        if self._inotify is not None:
            poller.register(self._inotify.fd, select.POLLIN)
        try:
            while not self._stopping:
                for fd, _ in poller.poll(self._timeout_ms()):
                    self._woken(fd)
                while self._commands:
                    self._commands.popleft().run()
                if not self._stopping and time.monotonic() >= self._next_look:
                    self._timed_look()
        finally:
            self._close_descriptors()

    def _timeout_ms(self) -> int | None:
        if self._next_look == math.inf:
            return None
        return max(0, math.ceil((self._next_look - time.monotonic()) * 1000))

    def _woken(self, fd: int) -> None:
        if fd == self._wake_read:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        elif self._inotify is not None:
            self._inotify.drain()
            self._look_again = True
            self._next_look = min(self._next_look, self._last_look + self._look_cost_s / BUSY_SHARE)

    def _timed_look(self) -> None:
        started = time.thread_time()
        try:
            self._look()
        except (OSError, ConfigError) as error:
            self._tell_outage(str(error))
        except Exception:  # noqa: BLE001 - the thread's boundary: a bug must not blind the process for good
            _log.error("looking at the registry failed", exc_info=self._outage is None)
            self._tell_outage("internal error, see the log")
        self._look_cost_s = time.thread_time() - started
        self._last_look = time.monotonic()
        idle_s = min(max(LOOK_INTERVAL_S, self._look_cost_s / IDLE_SHARE), MAX_LOOK_INTERVAL_S)
        self._next_look = self._last_look + (AFTER_WAKE_S if self._look_again else idle_s)
        self._look_again = False

    def _look(self) -> None:
        self._folder.check()
        mend = self._may_mend()
        if mend:
            self._folder.ensure()
        for claim in self._claims.values():
            if mend or not claim.published:
                self._keep(claim)
        self._deliver_news(self._catalogue.look(mend=mend))
        if self._scanner is None:
            self._tell_outage(None)
        else:
            self._scan(self._scanner)

    def _may_mend(self) -> bool:
        """Whether something has been missing long enough."""
        if self._is_wiped():
            self._missing_since = min(self._missing_since, time.monotonic())
        else:
            self._missing_since = math.inf
        return time.monotonic() >= self._missing_since + MEND_DELAY_S

    def _is_wiped(self) -> bool:
        if self._catalogue.is_wiped() or not self._folder.instances.is_dir():
            return True
        return not all(map(self._folder.holds, self._claims.values()))

    def _scan(self, scanner: Scanner) -> None:
        if self._inotify is not None:
            self._inotify.follow(self._folder.path)
            self._inotify.follow(self._folder.instances)
        self._deliver_news(scanner.look())
        if not self._synced:
            self._synced = True
            self._deliver_news([Synced()])
        wiped = f"records of living workers are gone from {self._folder.path}: {', '.join(scanner.orphans[:5])}"
        self._tell_outage(wiped if scanner.orphans else None)
        if scanner.dead and time.monotonic() >= self._next_clean:
            self._next_clean = time.monotonic() + CLEAN_INTERVAL_S
            self._folder.remove_dead()

    def _keep(self, claim: Claim) -> None:
        """Make the record say what it should, also after the store was wiped."""
        try:
            if not claim.published or not self._folder.holds(claim):
                self._folder.replace(claim, claim.data)
            self._conflicts.discard(claim.worker_id)
        except Held as error:
            if claim.worker_id not in self._conflicts:
                self._conflicts.add(claim.worker_id)
                _log.error("lost the registration: %s", error)

    def _look_within(self, seconds: float) -> None:
        self._next_look = min(self._next_look, time.monotonic() + seconds)

    def _deliver_news(self, events: list[RegistryEvent]) -> None:
        if events:
            self._deliver(events)

    def _tell_outage(self, reason: str | None) -> None:
        """Report changes only."""
        if (reason is None) == (self._outage is None):
            return
        self._outage = reason
        if reason is None:
            _log.info("registry %s is back", self._folder.path)
        else:
            _log.warning("registry outage, keeping the last picture: %s", reason)
        self._deliver([Outage(reachable=reason is None, reason=reason or "")])

    def _close_descriptors(self) -> None:
        if self._scanner is not None:
            self._scanner.close()
        if self._inotify is not None:
            self._inotify.close()
        with self._wake_lock:
            self._ended = True
            os.close(self._wake_read)
            os.close(self._wake_write)
        for command in self._commands:
            command.future.set_exception(ConfigError("the registry handle was closed"))


def _close_after_fork(claim: Claim) -> None:
    """A forked child shares the lock: without this, a worker would seem alive as long as any child of it."""
    reference = weakref.ref(claim)

    def close() -> None:
        held = reference()
        if held is not None:
            with contextlib.suppress(OSError):
                os.close(held.fd)

    os.register_at_fork(after_in_child=close)
