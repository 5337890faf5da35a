"""The engine suite on TensorRT-LLM, attached by its URL and in the worker: our doubles of its server and of its API."""

import sys
from pathlib import Path

import msgspec
import pytest

from attached_stage import WithItsServer
from headwater.config.schema import EngineConfig
from headwater.engines.base import Engine
from headwater.engines.conformance import EngineConformance
from headwater.engines.registry import create_engine
from headwater.engines.suite import SIZES
from trtllm_double import TrtllmDouble
from trtllm_llm import LLM, package
from trtllm_model import Fabric
from word_tokenizer import write_word_tokenizer


class WithItsTrtllm(WithItsServer):
    def __init__(self, config: EngineConfig, double: TrtllmDouble) -> None:
        super().__init__(config, double, "trtllm")
        self._trtllm = double

    async def close_engine(self) -> None:
        await super().close_engine()
        assert not self._trtllm.metrics_read, "iteration statistics are for whoever reads them first"


class TrtllmConformance(EngineConformance):
    plans_itself = True
    batch_invariant = False

    @pytest.fixture(autouse=True)
    def _tokenizer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        self.tokenizer = write_word_tokenizer(tmp_path)

    def mocker(self, sizes: EngineConfig) -> EngineConfig:
        return msgspec.structs.replace(sizes, tokenizer=str(self.tokenizer), mocker_decode_base_ms=2.0)


class TestAttachedTrtllm(TrtllmConformance):
    keeps_salts = False
    counts_preemptions = False

    def create(self, sizes: EngineConfig) -> Engine:
        events = 4096 if sizes.enable_prefix_caching else 0
        own = msgspec.structs.replace(sizes, tokenizer=str(self.tokenizer))
        return WithItsTrtllm(own, TrtllmDouble(self.mocker(sizes), events=events))


class TestTrtllmInTheWorker(TrtllmConformance):
    """Over a stand-in for TensorRT-LLM's own package."""

    kv_flags: tuple[str, ...] = ()

    @pytest.fixture(autouse=True)
    def _package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, module in package().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(LLM, "made", [])
        monkeypatch.setattr(LLM, "fabric", Fabric())

    def create(self, sizes: EngineConfig) -> Engine:
        LLM.mocker = self.mocker(SIZES)
        blocks = ("--kv-cache-config.tokens-per-block", str(sizes.block_size), *self.kv_flags)
        own = msgspec.structs.replace(sizes, engine="trtllm", model="double", tokenizer=str(self.tokenizer))
        return create_engine(msgspec.structs.replace(own, engine_args=blocks))


class TestTrtllmInTheWorkerWithItsSecondManager(TestTrtllmInTheWorker):
    """Whose KV events name no salts."""

    kv_flags = ("--kv-cache-config.use-kv-cache-manager-v2", "true")
