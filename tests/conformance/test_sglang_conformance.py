"""The engine suite on SGLang: a server attached by its URL, whose chunks are whole or incremental, and in the worker.

SGLang does not run here; it is doubles of its server and of its `Engine` that are spoken to."""

import json
from pathlib import Path

import msgspec
import pytest

from headwater.config.schema import EngineConfig
from headwater.engines.attached.engine import AttachedEngine
from headwater.engines.base import Engine, EngineInfo, EngineListener, ProgressSink
from headwater.engines.conformance import VOCABULARY, EngineConformance
from headwater.engines.registry import create_engine
from sglang_double import SglangDouble
from sglang_engine_double import installed


class WithItsServer(AttachedEngine):
    """Starts the server just before it attaches to it, and stops it afterwards."""

    def __init__(self, config: EngineConfig, double: SglangDouble) -> None:
        super().__init__(msgspec.structs.replace(config, attach=("http://127.0.0.1:1",)))
        self._own_config = config
        self._double = double

    async def start(self, listener: EngineListener, progress: ProgressSink) -> EngineInfo:
        await self._double.start()
        attached = msgspec.structs.replace(self._own_config, attach=(self._double.url,))
        AttachedEngine.__init__(self, attached)
        info = await super().start(listener, progress)
        assert info.engine == "attached-sglang"
        return info

    async def close_engine(self) -> None:
        await super().close_engine()
        await self._double.close()


class SglangConformance(EngineConformance):
    plans_itself = True
    incremental = False

    @pytest.fixture(autouse=True)
    def _tokenizer(self, tmp_path: Path) -> None:
        vocab = {f"Ġ{chr(97 + n // 26)}{chr(97 + n % 26)}": n for n in range(VOCABULARY + 20)}
        self.tokenizer = tmp_path / "tokenizer.json"
        model = {"type": "WordLevel", "vocab": {**vocab, "[UNK]": len(vocab)}, "unk_token": "[UNK]"}
        self.tokenizer.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))

    def mocker(self, sizes: EngineConfig) -> EngineConfig:
        return msgspec.structs.replace(sizes, tokenizer=str(self.tokenizer), mocker_decode_base_ms=2.0)


class TestAttachedSglang(SglangConformance):
    def create(self, sizes: EngineConfig) -> Engine:
        own = msgspec.structs.replace(sizes, tokenizer=str(self.tokenizer))
        return WithItsServer(own, SglangDouble(self.mocker(sizes), incremental=self.incremental))


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
