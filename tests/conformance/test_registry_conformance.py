"""Both registries against the contract."""

import os
from pathlib import Path

import pytest

from headwater.runtime.registry.base import Registry
from headwater.runtime.registry.conformance import RegistryConformance
from headwater.runtime.registry.file import FileRegistry
from headwater.runtime.registry.memory import MemoryRegistry, MemoryStore


class TestMemoryRegistry(RegistryConformance):
    @pytest.fixture(autouse=True)
    def _store(self) -> None:
        self.store = MemoryStore()

    def open_handle(self) -> Registry:
        return MemoryRegistry(self.store)

    def crash(self, registry: Registry) -> None:
        assert isinstance(registry, MemoryRegistry)
        for lease in registry._leases:
            lease.expire()


class TestFileRegistry(RegistryConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "registry"

    def open_handle(self) -> Registry:
        return FileRegistry(self.path)

    def crash(self, registry: Registry) -> None:
        assert isinstance(registry, FileRegistry)
        keeper = registry._started()

        def vanish() -> None:
            for claim in keeper._claims.values():
                os.close(claim.fd)
            keeper._claims.clear()

        keeper.call(vanish).result(5)
