"""The engine suite on TensorRT-LLM, attached by its URL and in the worker: our doubles of its server and of its API."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from headwater.config.schema import EngineConfig
from headwater.engines.attached.engine import AttachedEngine
from headwater.engines.base import Engine, EngineInfo, EngineListener, ProgressSink
from headwater.engines.conformance import SIZES, VOCABULARY, EngineConformance
from headwater.engines.registry import create_engine
from trtllm_double import TrtllmDouble
from trtllm_llm import LLM, package
from trtllm_model import Fabric


class WithItsServer(AttachedEngine):
    """Starts the server just before it attaches to it, and stops it afterwards."""

    def __init__(self, config: EngineConfig, double: TrtllmDouble) -> None:
        super().__init__(msgspec.structs.replace(config, attach=("http://127.0.0.1:1",)))
        self._own_config = config
        self._double = double

    async def start(self, listener: EngineListener, progress: ProgressSink) -> EngineInfo:
        await self._double.start()
        attached = msgspec.structs.replace(self._own_config, attach=(self._double.url,))
        AttachedEngine.__init__(self, attached)
        info = await super().start(listener, progress)
        assert info.engine == "attached-trtllm"
        return info

    async def close_engine(self) -> None:
        await super().close_engine()
        await self._double.close()
        assert not self._double.metrics_read, "iteration statistics are for whoever reads them first"


class TrtllmConformance(EngineConformance):
    plans_itself = True

    @pytest.fixture(autouse=True)
    def _tokenizer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        vocab = {f"Ġ{chr(97 + n // 26)}{chr(97 + n % 26)}": n for n in range(VOCABULARY + 20)}
        self.tokenizer = tmp_path / "tokenizer.json"
        model = {"type": "WordLevel", "vocab": {**vocab, "[UNK]": len(vocab)}, "unk_token": "[UNK]"}
        self.tokenizer.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))

    def mocker(self, sizes: EngineConfig) -> EngineConfig:
        return msgspec.structs.replace(sizes, tokenizer=str(self.tokenizer), mocker_decode_base_ms=2.0)


class TestAttachedTrtllm(TrtllmConformance):
    keeps_salts = False
    counts_preemptions = False

    def create(self, sizes: EngineConfig) -> Engine:
        events = 4096 if sizes.enable_prefix_caching else 0
        own = msgspec.structs.replace(sizes, tokenizer=str(self.tokenizer))
        return WithItsServer(own, TrtllmDouble(self.mocker(sizes), events=events))


class TestTrtllmInTheWorker(TrtllmConformance):
    """Over a stand-in for TensorRT-LLM's own package."""

    @pytest.fixture(autouse=True)
    def _package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, module in package().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(LLM, "made", [])
        monkeypatch.setattr(LLM, "fabric", Fabric())

    def create(self, sizes: EngineConfig) -> Engine:
        LLM.mocker = self.mocker(SIZES)
        blocks = ("--kv-cache-config.tokens-per-block", str(sizes.block_size))
        own = msgspec.structs.replace(sizes, engine="trtllm", model="double", tokenizer=str(self.tokenizer))
        return create_engine(msgspec.structs.replace(own, engine_args=blocks))
