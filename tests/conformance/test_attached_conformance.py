"""The engine suite on a server attached by its URL: our double of vLLM's server, in the same process."""

import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest

from attached_stage import WithItsServer
from headwater.config.schema import EngineConfig
from headwater.engines.base import Engine
from headwater.engines.conformance import EngineConformance
from vllm_double import VllmDouble
from word_tokenizer import write_word_tokenizer


class TestAttachedVllm(EngineConformance):
    plans_itself = True
    batch_invariant = False

    @pytest.fixture(autouse=True)
    def _tokenizer(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.tokenizer = write_word_tokenizer(tmp_path)

    def create(self, sizes: EngineConfig) -> Engine:
        mocker = msgspec.structs.replace(sizes, tokenizer=str(self.tokenizer), mocker_decode_base_ms=2.0)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        shutil.rmtree(folder)
        own = msgspec.structs.replace(sizes, tokenizer=str(self.tokenizer))
        return WithItsServer(own, VllmDouble(mocker, folder), "vllm")
