"""The model catalogue of a `file` registry: one file, replaced as a whole.

A version of the same generation that lacks a model removed it. A file that vanished, or that began a new generation,
was wiped: nothing was removed, and every handle puts back the models it still knows.
"""

import logging
import uuid
from collections.abc import Callable

import msgspec

from headwater.errors import ConfigError
from headwater.protocol.cluster import CatalogueEntry
from headwater.runtime.registry.base import ModelGone, ModelPut, RegistryEvent
from headwater.runtime.registry.folder import MAX_CATALOGUE_BYTES, Folder

_log = logging.getLogger(__name__)

Models = dict[str, CatalogueEntry]


class CatalogueFile(msgspec.Struct, frozen=True):
    """What is written."""

    generation: str
    models: Models


class Catalogue:
    """One handle's picture of the catalogue and its way to change it. Used on one thread."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._generation: str | None = None
        self._version: tuple[int, int, int] | None = None
        self._decoder = msgspec.json.Decoder(CatalogueFile)
        self.models: Models = {}

    def is_wiped(self) -> bool:
        """Whether there is no catalogue although there was one."""
        return bool(self.models) and self._folder.catalogue_version() is None

    def look(self, *, mend: bool = True) -> list[RegistryEvent]:
        """What changed since the last look. `mend`: put back what was wiped."""
        version = self._folder.catalogue_version()
        if version is None:
            return self.change(lambda models: models) if self.models and mend else []
        if version == self._version:
            return []
        self._version = version
        found = self._read()
        if found is None:
            return []
        if self._is_rebuilt(found) and not self.models.keys() <= found.models.keys():
            return self.change(lambda models: models)
        return self._adopt(found)

    def change(self, edit: Callable[[Models], Models]) -> list[RegistryEvent]:
        """Read, edit and write as one change."""
        with self._folder.changing_catalogue():
            found = self._read() or CatalogueFile(uuid.uuid4().hex, {})
            models = self.models | found.models if self._is_rebuilt(found) else found.models
            changed = CatalogueFile(found.generation, edit(models))
            data = msgspec.json.encode(changed)
            if len(data) > MAX_CATALOGUE_BYTES:
                raise ConfigError(f"the model catalogue has {len(data):,} bytes; at most {MAX_CATALOGUE_BYTES:,} fit")
            self._folder.write_catalogue(data)
            self._version = self._folder.catalogue_version()
        return self._adopt(changed)

    def _is_rebuilt(self, found: CatalogueFile) -> bool:
        return self._generation is not None and self._generation != found.generation

    def _adopt(self, found: CatalogueFile) -> list[RegistryEvent]:
        before, self.models, self._generation = self.models, found.models, found.generation
        events: list[RegistryEvent] = [ModelGone(name) for name in before if name not in found.models]
        events += [ModelPut(entry) for name, entry in found.models.items() if before.get(name) != entry]
        return events

    def _read(self) -> CatalogueFile | None:
        """None when there is none that can be understood; the next change then replaces it."""
        data = self._folder.read_catalogue()
        if data is None:
            return None
        try:
            return self._decoder.decode(data)
        except ValueError as error:
            _log.warning("ignoring the model catalogue in %s: %s", self._folder.path, error)
            return None
