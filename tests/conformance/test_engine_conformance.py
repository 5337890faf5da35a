"""Every engine against the contract."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.config.schema import EngineConfig
from headwater.engines.base import Engine
from headwater.engines.engine import CoreEngine
from headwater.engines.kv_conformance import KvPortConformance
from headwater.engines.loop import ThreadedLoop
from headwater.engines.mocker.engine import MockerEngine
from headwater.engines.registry import create_engine
from headwater.engines.suite import VOCABULARY


class MockerConformance(KvPortConformance):
    """A mocker with a tokenizer of a few hundred words, so that it starts in no time."""

    config = EngineConfig(engine="mocker")

    @pytest.fixture(autouse=True)
    def _tokenizer(self, tmp_path: Path) -> None:
        vocab = {f"Ġ{chr(97 + n // 26)}{chr(97 + n % 26)}": n for n in range(VOCABULARY + 20)}
        file = tmp_path / "tokenizer.json"
        file.write_text(json.dumps({"model": {"vocab": vocab}}))
        self.config = msgspec.structs.replace(self.config, tokenizer=str(file))

    def sized(self, sizes: EngineConfig) -> EngineConfig:
        own = {name: getattr(self.config, name) for name in ("engine", "tokenizer", "mocker_speedup")}
        return msgspec.structs.replace(sizes, **own)

    def create(self, sizes: EngineConfig) -> Engine:
        return create_engine(self.sized(sizes))


class TestMockerAtInfiniteSpeed(MockerConformance):
    config = EngineConfig(engine="mocker", mocker_speedup=0)


class TestMockerInModelledTime(MockerConformance):
    config = EngineConfig(engine="mocker", mocker_speedup=5)


class TestMockerOnAThread(MockerConformance):
    """The loop of the native engine, without its model."""

    def create(self, sizes: EngineConfig) -> Engine:
        mocker = MockerEngine(self.sized(sizes))
        return CoreEngine(sizes, mocker._build, ThreadedLoop())


class TestNative(KvPortConformance):
    """On the CPU, with a tiny model of random weights."""

    @pytest.fixture(autouse=True)
    def _model(self, tiny_model: "Callable[..., Any]", tmp_path: Path) -> None:
        self.folder = tmp_path / "model"
        self.cache = tmp_path / "weights"
        shutil.copytree(tiny_model("llama").folder, self.folder, ignore=shutil.ignore_patterns("cache"))
        config = json.loads((self.folder / "config.json").read_text())
        (self.folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))

    def create(self, sizes: EngineConfig) -> Engine:
        config = msgspec.structs.replace(
            sizes, engine="native", model=str(self.folder), device="cpu", threads=1, weights_cache=str(self.cache)
        )
        return create_engine(config)
