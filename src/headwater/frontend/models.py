"""The models that can be asked for: catalogue, live workers, and what was built from their files.

A served name stands for one fingerprint at a time: the one in the catalogue if workers with it are up, else the one
most workers have. A model is built (tokenizer, template) once per fingerprint, in a thread, from files of any of its
workers, and forgotten when neither the catalogue nor a worker has it any more. `get` and `cards` answer from a table
that is made anew on every change, so they cost nothing per request and may be called from any thread.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headwater.errors import HeadwaterError, ModelError, ModelNotFound, NoWorkers
from headwater.frontend.artifacts import ArtifactCache, verify
from headwater.frontend.connection import WorkerConnection
from headwater.frontend.loading import ModelLoading
from headwater.protocol.cluster import Artifact, CatalogueEntry, ModelCard
from headwater.router.view import ClusterView

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT")
Build = Callable[[ModelCard, Mapping[str, bytes]], ModelT]
"""Makes what the API layer serves a model with; blocks for a second, so it runs in a thread. Raises `ModelError`."""

_RETRY_AFTER_S = 5.0
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_MAX_NAMED = 20


@dataclass(slots=True)
class _Entry(Generic[ModelT]):
    """One fingerprint."""

    card: ModelCard
    built: ModelT | None = None
    problem: str = ""
    """Why it is not built yet."""
    task: asyncio.Task[None] | None = None
    has_workers: bool = False
    """Whether requests can be sent to some worker now."""
    sources: dict[str, WorkerConnection] = field(default_factory=dict[str, WorkerConnection])
    """Connected workers that have its files."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once building it has succeeded or failed for the first time."""

    @property
    def loading(self) -> bool:
        """Whether it will be served in a moment, if all goes well."""
        return self.built is None and self.has_workers and not self.settled.is_set()


class ModelSet(Generic[ModelT]):
    """Knows the served names. Fed by the cluster, asked by the API layer."""

    def __init__(
        self,
        view: ClusterView,
        build: Build[ModelT],
        cache: ArtifactCache,
        on_built: Callable[[], None] = lambda: None,
    ) -> None:
        self._view = view
        self._on_built = on_built
        self._build = build
        self._cache = cache
        self._catalogue: dict[str, ModelCard] = {}
        self._entries: dict[str, _Entry[ModelT]] = {}
        self._current: dict[str, _Entry[ModelT]] = {}
        self.relays = False
        """Whether any model is relayed."""
        self.synced = False
        """Whether the registry has told all it knew when we began to listen."""

    # -- asked by the API layer ---------------------------------------------------------------------------------

    def get(self, name: str) -> ModelT:
        """Raises `ModelNotFound`, or `NoWorkers` for a model that exists but cannot be served now: `ModelLoading` for
        one that is being built for the first time."""
        entry = self._current.get(name)
        if entry is not None and entry.built is not None and entry.has_workers:
            return entry.built
        if entry is None and not self.synced:
            raise NoWorkers("this frontend has not yet heard which models there are", retry_after_s=_RETRY_AFTER_S)
        if entry is None:
            known = sorted(self._current)
            if not known:  # its workers may be about to come
                raise NoWorkers("no worker has registered a model yet", retry_after_s=_RETRY_AFTER_S)
            listed = ", ".join(known[:_MAX_NAMED]) + (", ..." if len(known) > _MAX_NAMED else "")
            raise ModelNotFound(f"the model {name[:200]!r} does not exist; there is {listed}", param="model")
        refusal = f"the model {name} cannot be served at the moment: {self._missing(entry)}"
        if entry.loading:
            raise ModelLoading(refusal, entry.settled)
        raise NoWorkers(refusal, retry_after_s=_RETRY_AFTER_S)

    def cards(self) -> list[ModelCard]:
        """Of every model that is built, whether or not it has workers now, or that will be in a moment; each once."""
        entries = {id(entry): entry for entry in self._current.values()}.values()
        return [entry.card for entry in entries if entry.built is not None or entry.loading]

    # -- asked by health pages ----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether some model can be served."""
        return any(self._missing(entry) == "" for entry in self._current.values())

    def missing(self) -> dict[str, str]:
        """For every name that cannot be served, why."""
        reasons = {name: self._missing(entry) for name, entry in sorted(self._current.items())}
        return {name: reason for name, reason in reasons.items() if reason}

    def names(self) -> list[str]:
        return sorted(self._current)

    def card(self, name: str) -> ModelCard:
        return self._current[name].card

    # -- fed by the cluster -------------------------------------------------------------------------------------

    def put_catalogue(self, entry: CatalogueEntry) -> None:
        self._catalogue[entry.name] = entry.card
        self.refresh()

    def remove_catalogue(self, name: str) -> None:
        self._catalogue.pop(name, None)
        self.refresh()

    def add_source(self, connection: WorkerConnection) -> None:
        """A worker can be asked for files."""
        card = connection.instance.card
        if not card.fingerprint:
            return  # it has not loaded yet
        entry = self._entry(card)
        entry.sources[connection.worker_id] = connection
        if entry.built is None and entry.task is None:
            entry.task = asyncio.get_running_loop().create_task(
                self._build_until_done(entry), name=f"build {card.name}"
            )
        self.refresh()

    def remove_source(self, connection: WorkerConnection) -> None:
        entry = self._entries.get(connection.instance.card.fingerprint)
        if entry is not None:
            entry.sources.pop(connection.worker_id, None)
        self.refresh()

    def refresh(self) -> None:
        """Workers or catalogue changed: decide again what each name stands for."""
        loaded = [worker.instance.card for worker in self._view.workers if worker.instance.card.fingerprint]
        live = Counter(card.fingerprint for card in loaded)
        cards = {card.fingerprint: card for card in loaded}
        for card in (*self._catalogue.values(), *cards.values()):
            self._entry(card)
        self._forget(live.keys() | {card.fingerprint for card in self._catalogue.values()})
        for fingerprint, entry in self._entries.items():
            entry.has_workers = bool(self._view.eligible(fingerprint))
        current: dict[str, _Entry[ModelT]] = {}
        for name, fingerprints in self._names(cards.values()).items():
            catalogued = self._catalogue.get(name)
            best = max(fingerprints, key=lambda f: self._preference(f, catalogued, live))
            current[name] = self._entries[best]
        self._current = current
        self.relays = any(entry.card.relayed for entry in current.values())

    async def close(self) -> None:
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inner life ---------------------------------------------------------------------------------------------

    def _entry(self, card: ModelCard) -> _Entry[ModelT]:
        entry = self._entries.get(card.fingerprint)
        if entry is None:
            entry = self._entries[card.fingerprint] = _Entry(card)
        return entry

    def _forget(self, wanted: set[str]) -> None:
        for fingerprint in self._entries.keys() - wanted:
            entry = self._entries.pop(fingerprint)
            if entry.task is not None:
                entry.task.cancel()

    def _names(self, cards: Iterable[ModelCard]) -> dict[str, set[str]]:
        """Which fingerprints claim each served name."""
        claims: dict[str, set[str]] = {}
        for card in (*self._catalogue.values(), *cards):
            for name in {card.name, *card.served_names}:
                claims.setdefault(name, set()).add(card.fingerprint)
        for name, card in self._catalogue.items():
            claims.setdefault(name, set()).add(card.fingerprint)
        return claims

    def _preference(
        self, fingerprint: str, catalogued: ModelCard | None, live: Mapping[str, int]
    ) -> tuple[bool, bool, int, str]:
        entry = self._entries[fingerprint]
        servable = entry.built is not None and entry.has_workers
        in_catalogue = catalogued is not None and catalogued.fingerprint == fingerprint
        return servable, in_catalogue, live.get(fingerprint, 0), fingerprint

    def _missing(self, entry: _Entry[ModelT]) -> str:
        if entry.built is None:
            return entry.problem or "no worker with its files is connected"
        if entry.has_workers:
            return ""
        own = (worker for worker in self._view.workers if worker.instance.card.fingerprint == entry.card.fingerprint)
        return next((worker.away for worker in own if worker.away), "no worker is ready")

    async def _build_until_done(self, entry: _Entry[ModelT]) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                entry.built = await self._build_once(entry)
            except HeadwaterError as error:
                entry.problem = error.message
                logger.warning("model %s cannot be served yet: %s", entry.card.name, error.message)
            except Exception as error:  # border to foreign files and libraries
                entry.problem = f"building it failed: {type(error).__name__}"
                logger.exception("model %s cannot be served", entry.card.name)
            else:
                entry.problem = ""
                entry.task = None
                self.refresh()
                self._on_built()
                return
            finally:
                entry.settled.set()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    async def _build_once(self, entry: _Entry[ModelT]) -> ModelT:
        entry.problem = "its files are being fetched"
        artifacts = {artifact.name: await self._artifact(entry, artifact) for artifact in entry.card.artifacts}
        entry.problem = "its tokenizer is being loaded"
        return await asyncio.to_thread(self._build, entry.card, artifacts)

    async def _artifact(self, entry: _Entry[ModelT], artifact: Artifact) -> bytes:
        cached = await asyncio.to_thread(self._cache.load, artifact)
        if cached is not None:
            return cached
        failure: HeadwaterError = ModelError("no worker with its files is connected")
        for connection in list(entry.sources.values()):
            try:
                data = await connection.fetch(artifact)
                data = await asyncio.to_thread(verify, artifact, data)
            except HeadwaterError as error:
                failure = error
                continue
            await asyncio.to_thread(self._cache.store, artifact, data)
            return data
        raise failure
