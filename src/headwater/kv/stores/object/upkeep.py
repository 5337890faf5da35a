"""What an object tier does on the side: load and save its ledger, delete what must go, let what is old expire.

Expiry counts from the writing of an object and is judged by the bucket's own time stamps when it sweeps, so it also
takes what nobody owns: objects of nodes that are gone, or written right before a crash. A lifecycle rule of the bucket
may do the same. This is the only place that lists, besides clearing.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Sequence

import msgspec

from headwater.clock import Clock
from headwater.errors import TierUnavailable
from headwater.kv.block import Family
from headwater.kv.stores.object.bucket import Bucket, Listed
from headwater.kv.stores.object.catalogue import Catalogue, Doomed
from headwater.kv.stores.object.runs import family_digest, family_folder
from headwater.kv.stores.object.writing import FAMILIES, Writer

_log = logging.getLogger(__name__)

SAVE_EVERY_S = 10.0
SAVE_AFTER_CHANGES = 64
_LOOK_EVERY_S = 1.0
_MIN_SWEEP_S = 600.0
_MAX_SWEEP_S = 86400.0
_AFTER_BUG_S = 60.0
_RUN_KEY = re.compile("runs/[0-9a-f]{32}/[0-9]{1,9}/[0-9a-f]{32}")


class Upkeep:
    """One task from `start` to `close`."""

    def __init__(
        self, catalogue: Catalogue, bucket: Bucket, writer: Writer, clock: Clock, chance: Callable[[], float]
    ) -> None:
        self._catalogue = catalogue
        self._bucket = bucket
        self._writer = writer
        self._clock = clock
        self._chance = chance
        self._version: dict[str, str] | None = None
        self._loaded = False
        self._tried = asyncio.Event()
        """Set once the ledger was asked for, with or without success."""
        self._last_saved = clock.now()
        self._next_sweep = clock.now() + self._sweep_every_s() * chance()
        self._told = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="kv-object-upkeep")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._catalogue.ledger.num_changes and self._bucket.breaker.closed:
            with contextlib.suppress(TierUnavailable):
                await self.save()

    async def loaded(self) -> None:
        """Wait until it is known what this node owns; raises `TierUnavailable`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._catalogue.options.request_timeout_s):
                await self._tried.wait()
        if not self._loaded:
            raise self._bucket.unavailable()

    # The ledger

    @property
    def _ledger_key(self) -> str:
        return f"owners/{self._catalogue.options.owner}"

    async def load(self) -> None:
        found = await self._bucket.read(self._ledger_key)
        if found is not None:
            body, self._version = found
            try:
                self._catalogue.ledger.merge(body, limits=not self._loaded)
            except msgspec.MsgspecError as error:
                _log.error(
                    "the ledger %s at %s is damaged, a new one is begun: %s", self._ledger_key, self._bucket.url, error
                )
        await self._name_folders()
        if not self._loaded:
            self._catalogue.loaded()
        self._loaded = True

    async def _name_folders(self) -> None:
        """Whose objects are of which an older version has saved no more than that they are ours."""
        unnamed = {folder: _digest(folder) for folder in self._catalogue.ledger.unnamed()}
        digests = [digest for digest in unnamed.values() if digest is not None]
        found = await asyncio.gather(*(self._read_family(digest) for digest in digests))
        families = dict(zip(digests, found, strict=True))
        for folder, digest in unnamed.items():
            family = families.get(digest) if digest is not None else None
            self._catalogue.ledger.name(folder, family.tenant if family is not None else "")

    async def save(self) -> None:
        num_changes = self._catalogue.ledger.num_changes
        version = await self._bucket.replace(self._ledger_key, self._catalogue.ledger.encode(), self._version)
        if version is None:
            await self._share()
            return
        self._version = version
        self._last_saved = self._clock.now()
        self._catalogue.ledger.saved(num_changes)

    async def _share(self) -> None:
        """Somebody else has written our ledger: take in what is in it; the next saving comes on top of that."""
        if not self._told:
            self._told = True
            _log.warning(
                "another process keeps the ledger of %r at %s: give each node an owner name of its own",
                self._catalogue.options.owner,
                self._bucket.url,
            )
        await self.load()

    # Going

    async def expire(self) -> None:
        """Delete what we own and wrote too long ago."""
        ttl_s = self._catalogue.options.ttl_s
        if ttl_s:
            for name, owned in self._catalogue.ledger.written_before(self._clock.epoch() - ttl_s):
                self._catalogue.evict(name, owned)
        await self._writer.delete_doomed()

    async def sweep(self) -> int:
        """Delete what anybody wrote too long ago; how many objects."""
        oldest = self._clock.epoch() - self._catalogue.options.ttl_s
        swept = 0
        async for chunk in self._bucket.list("runs"):
            swept += await self._delete([key for key, one in _runs(chunk) if one.modified.timestamp() < oldest])
        if swept:
            _log.info("object tier %s: %d objects expired", self._bucket.url, swept)
        return swept

    async def clear(self, *, tenant: str | None, model: str | None) -> int:
        """Delete every object of the families that match, whoever wrote it; how many blocks."""
        cleared = self._clear_gathered(tenant, model)
        for digest, family in (await self._all_families()).items():
            if family.matches(tenant, model):
                async for chunk in self._bucket.list(family_folder(digest)):
                    keys = [key for key, _ in _runs(chunk)]
                    cleared += sum(map(self._num_blocks, keys))
                    await self._delete(keys)
        return cleared

    def _clear_gathered(self, tenant: str | None, model: str | None) -> int:
        catalogue = self._catalogue
        return catalogue.drop_gathered(
            loose.block.id
            for loose in catalogue.gathering.oldest()
            if catalogue.families[loose.shape.family].matches(tenant, model)
        )

    async def _all_families(self) -> dict[bytes, Family]:
        families = dict(self._catalogue.families)
        async for chunk in self._bucket.list(FAMILIES):
            for one in chunk:
                digest = _hex(one.key.rsplit("/", 1)[-1])
                if digest is not None and digest not in families:
                    family = await self._read_family(digest)
                    if family is not None:
                        families[digest] = family
        return families

    async def _read_family(self, digest: bytes) -> Family | None:
        found = await self._bucket.read(f"{FAMILIES}{digest.hex()}")
        return _family(found[0], digest) if found is not None else None

    def _num_blocks(self, key: str) -> int:
        """Blocks of a listed object that count as there."""
        known = self._catalogue.blocks.run(_name(key))
        return known.num_blocks if known is not None else int(key.split("/")[-2])

    async def _delete(self, keys: list[str]) -> int:
        await self._writer.delete([Doomed(_name(key), key) for key in keys])
        return len(keys)

    # The task

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except TierUnavailable:
                pass  # told where it happened, and tried again
            except Exception:  # noqa: BLE001  the task must not end with a mistake of ours: it is logged and slowed down
                _log.exception("object tier %s: upkeep failed, and is tried again later", self._bucket.url)
                await asyncio.sleep(_AFTER_BUG_S)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self) -> None:
        if not self._loaded:
            try:
                await self.load()
            finally:
                self._tried.set()
        self._catalogue.regroup()
        await self.expire()
        changes, now = self._catalogue.ledger.num_changes, self._clock.now()
        if changes >= SAVE_AFTER_CHANGES or (changes and now - self._last_saved >= SAVE_EVERY_S):
            await self.save()
        if self._catalogue.options.ttl_s and now >= self._next_sweep:
            self._next_sweep = now + self._sweep_every_s() * (0.5 + self._chance())
            await self.sweep()

    def _sweep_every_s(self) -> float:
        return min(max(self._catalogue.options.ttl_s / 8, _MIN_SWEEP_S), _MAX_SWEEP_S)


def _name(key: str) -> bytes:
    return bytes.fromhex(key.rsplit("/", 1)[1])


def _runs(chunk: Sequence[Listed]) -> list[tuple[str, Listed]]:
    """Those that are objects of this tier: whatever else somebody has put there is left alone."""
    return [(one.key, one) for one in chunk if _RUN_KEY.fullmatch(one.key)]


def _digest(folder: str) -> bytes | None:
    """The family of a folder of runs."""
    parts = folder.split("/")
    return _hex(parts[1]) if len(parts) > 1 else None


def _hex(text: str) -> bytes | None:
    return bytes.fromhex(text) if re.fullmatch("[0-9a-f]{32}", text) else None


def _family(data: memoryview, digest: bytes) -> Family | None:
    try:
        family = msgspec.msgpack.decode(data, type=Family)
    except msgspec.MsgspecError:
        return None
    return family if family_digest(family) == digest else None
