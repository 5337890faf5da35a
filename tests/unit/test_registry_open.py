"""From a URL to a registry."""

import asyncio
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.runtime.registry.conformance import example_instance
from headwater.runtime.registry.file import FileRegistry
from headwater.runtime.registry.memory import MemoryRegistry, MemoryStore
from headwater.runtime.registry.open import open_registry


def test_memory_handles_of_one_name_share_a_store() -> None:
    async def check() -> None:
        one, two, other = (open_registry(f"memory://{name}") for name in ("a", "a", "b"))
        await one.register(example_instance())
        assert len(await two.instances()) == 1
        assert await other.instances() == []

    asyncio.run(check())


def test_a_memory_store_ends_with_its_last_handle() -> None:
    async def check() -> None:
        await open_registry("memory://gone").register(example_instance())
        assert await open_registry("memory://gone").instances() == []

    asyncio.run(check())


def test_file_paths_may_be_escaped(tmp_path: Path) -> None:
    async def check() -> None:
        registry = open_registry((tmp_path / "with space#").as_uri())
        assert isinstance(registry, FileRegistry)
        await registry.register(example_instance())
        assert (tmp_path / "with space#" / "instances" / "worker-1").exists()
        await registry.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/run/x",
        "file://host/x",
        "file:relative",
        "file:///x?y",
        "file:///x#y",
        "memory://",
        "memory://a/b",
        "etdc://x",
    ],
)
def test_what_is_no_registry_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="registry"):
        open_registry(url)


def test_the_nearest_scheme_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        open_registry("flie:///x")
    assert "did you mean file://" in (caught.value.hint or "")


def make_plugin(url: str) -> MemoryRegistry:
    registry = MemoryRegistry(MemoryStore())
    registry.url = url  # type: ignore[attr-defined]
    return registry


def test_packages_can_add_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("toy", f"{__name__}:make_plugin", "headwater.registries")
    monkeypatch.setattr(
        "headwater.runtime.registry.open.entry_points", lambda group: EntryPoints([point]).select(group=group)
    )
    registry = open_registry("toy://somewhere")
    assert registry.url == "toy://somewhere"  # type: ignore[attr-defined]
