"""Engines by name."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from headwater.config.schema import EngineConfig
from headwater.engines import registry
from headwater.engines.base import Engine
from headwater.engines.mocker.engine import MockerEngine
from headwater.errors import ConfigError


def offer(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    found = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in points.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.ENTRY_POINT_GROUP else [])


def test_built_in_engines_are_known() -> None:
    assert {"native", "mocker"} <= set(registry.engine_names())
    assert registry.engine_factory("mocker") is MockerEngine


def test_what_is_attached_to_needs_no_name_of_an_engine() -> None:
    engine = registry.create_engine(EngineConfig(attach=("http://127.0.0.1:1",)))
    assert type(engine).__name__ == "AttachedEngine"


def test_an_unknown_engine_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no engine 'moker'; did you mean 'mocker'\?") as caught:
        registry.engine_factory("moker")
    assert "native" in str(caught.value.hint)
    with pytest.raises(ConfigError, match=r"no engine 'zzz'$"):
        registry.engine_factory("zzz")


def test_entry_points_add_engines_and_cannot_replace_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, mine="headwater.engines.mocker.engine:MockerEngine", mocker="os:getcwd")
    assert registry.engine_factory("mine") is MockerEngine
    assert registry.engine_factory("mocker") is MockerEngine
    assert registry.engine_names() == ["attached", "mine", "mocker", "native", "sglang", "trtllm", "vllm"]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, rocket="no_such_package.engine:Rocket", stone="math:pi")
    with pytest.raises(ConfigError, match=r"'rocket' cannot be loaded: No module named 'no_such_package'"):
        registry.engine_factory("rocket")
    with pytest.raises(ConfigError, match=r"'stone'.* is not callable"):
        registry.engine_factory("stone")


def test_choosing_the_mocker_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from headwater.engines.registry import engine_factory; engine_factory('mocker');"
        "print(sorted({'torch', 'numpy', 'transformers', 'tokenizers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_mocker_is_an_engine() -> None:
    def takes(engine: Engine) -> Engine:
        return engine

    assert takes(MockerEngine(EngineConfig(engine="mocker")))
