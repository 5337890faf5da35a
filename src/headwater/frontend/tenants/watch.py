"""Keeps the keyring current: keys come, go and change without a restart.

At the start the keyring must be readable. Later, one that is not changes nothing: the last good one stays, the error
is logged once per message. Invariant: there is never a moment without keys.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from headwater.errors import ConfigError
from headwater.frontend.tenants.keyring import Keyring, decode_keyring
from headwater.frontend.tenants.source import KeySource

logger = logging.getLogger(__name__)

OnKeyring = Callable[[Keyring], None]


def read_keyring(source: KeySource) -> Keyring:
    """Raises `ConfigError`."""
    return decode_keyring(source.read(), source.name)


class KeyringWatch:
    def __init__(self, source: KeySource, current: Keyring, on_change: OnKeyring) -> None:
        self._source = source
        self._current = current
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._complaint = ""

    def start(self) -> None:
        if self._source.interval_s:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def look(self) -> None:
        """Read again if that may give something else."""
        if not self._source.changed():
            return
        try:
            keyring = await asyncio.to_thread(read_keyring, self._source)
        except ConfigError as error:
            if error.message != self._complaint:
                logger.error("the keyring stays as it was: %s", error.message)
            self._complaint = error.message
            return
        self._complaint = ""
        if keyring != self._current:
            self._current = keyring
            self._on_change(keyring)
            logger.info("keyring read: %d keys of %d tenants", len(keyring.keys), len(keyring.tenants))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._source.interval_s)
            await self.look()
