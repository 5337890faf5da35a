"""The engine suite on real vLLM, one engine start per form; for whoever has vLLM:

VLLM_PYTHON=build/peers/vllm/bin/python pytest -m vllm      (bench/peers/setup vllm makes that interpreter)
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

import model_fixtures

SUITE = Path(__file__).parent.parent / "vllm_suite.py"
VLLM_PYTHON = os.environ.get("VLLM_PYTHON")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_PYTHON is None, reason="VLLM_PYTHON names no interpreter with vLLM"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a shape that vLLM's CPU kernels take."""
    shape = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model_fixtures.FAMILIES, "llama", ("Llama", {"tie_word_embeddings": True, **shape}))
        model_fixtures.build_tiny_model(folder, "llama", "default")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("form", ["in-worker", "attached"])
def test_vllm(form: str, model: Path) -> None:
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(VLLM_PYTHON), str(SUITE), form, str(model)],
        capture_output=True,
        env=environment,
        check=False,
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b'{"check"')]
    assert len(results) > 25, done.stderr.decode()[-3000:]
    failed = {found["check"]: found["detail"] for found in results if found["result"] == "failed"}
    assert not failed, "\n".join(f"{name}: {detail}" for name, detail in failed.items())
