"""The engine suite on SGLang: a server attached by its URL, whose chunks are whole or incremental, and in the worker.

SGLang does not run here; it is doubles of its server and of its `Engine` that are spoken to."""

from pathlib import Path

import msgspec
import pytest

from attached_stage import WithItsServer
from headwater.config.schema import EngineConfig
from headwater.engines.base import Engine
from headwater.engines.conformance import EngineConformance
from headwater.engines.registry import create_engine
from sglang_double import SglangDouble
from sglang_engine_double import installed
from word_tokenizer import write_word_tokenizer


class SglangConformance(EngineConformance):
    plans_itself = True
    batch_invariant = False
    incremental = False

    @pytest.fixture(autouse=True)
    def _tokenizer(self, tmp_path: Path) -> None:
        self.tokenizer = write_word_tokenizer(tmp_path)

    def mocker(self, sizes: EngineConfig) -> EngineConfig:
        return msgspec.structs.replace(sizes, tokenizer=str(self.tokenizer), mocker_decode_base_ms=2.0)


class TestAttachedSglang(SglangConformance):
    def create(self, sizes: EngineConfig) -> Engine:
        own = msgspec.structs.replace(sizes, tokenizer=str(self.tokenizer))
        return WithItsServer(own, SglangDouble(self.mocker(sizes), incremental=self.incremental), "sglang")


class TestSglangInTheWorker(SglangConformance):
    """Over a double of SGLang's `Engine`."""

    @pytest.fixture(autouse=True)
    def _package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch

    def create(self, sizes: EngineConfig) -> Engine:
        installed(self.patch, self.mocker(sizes))
        own = msgspec.structs.replace(sizes, tokenizer=str(self.tokenizer), model="a/model", engine="sglang")
        return create_engine(own)


class TestAttachedSglangIncremental(TestAttachedSglang):
    incremental = True
