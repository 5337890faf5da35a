"""Prefill and decode on two real vLLM workers; for whoever has vLLM:

VLLM_PYTHON=build/peers/vllm/bin/python pytest -m vllm      (bench/peers/setup vllm makes that interpreter)
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

import model_fixtures

ROOT = Path(__file__).parents[2]
LIFE = ROOT / "tests/vllm_handoff_life.py"
VLLM_PYTHON = os.environ.get("VLLM_PYTHON")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_PYTHON is None, reason="VLLM_PYTHON names no interpreter with vLLM"),
]


def test_prefill_on_one_decode_on_another(tmp_path: Path) -> None:
    live(tmp_path, num_kv_heads=1, sizes=(1, 1))


@pytest.mark.parametrize(("num_kv_heads", "sizes"), [(2, (1, 2)), (1, (2, 1))], ids=["divided", "repeated"])
def test_prefill_and_decode_at_unequal_tensor_parallel_sizes(
    tmp_path: Path, num_kv_heads: int, sizes: tuple[int, int]
) -> None:
    live(tmp_path, num_kv_heads, sizes)


def live(folder: Path, num_kv_heads: int, sizes: tuple[int, int]) -> None:
    """All checks of `vllm_handoff_life` for these sizes of the prefill and the decode worker."""
    heads = {"head_dim": 32, "num_attention_heads": 2 * num_kv_heads, "num_key_value_heads": num_kv_heads}
    shape = {"tie_word_embeddings": True, "max_position_embeddings": 1024, **heads}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model_fixtures.FAMILIES, "llama", ("Llama", shape))
        model_fixtures.build_tiny_model(folder, "llama", "default")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}/bench"
    command = [str(VLLM_PYTHON), str(LIFE), str(folder), "--sizes", *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b'{"check"')]
    assert len(results) == 8, done.stderr.decode()[-3000:]
    failed = {found["check"]: found["detail"] for found in results if found["result"] == "failed"}
    assert not failed, "\n".join(f"{name}: {detail}" for name, detail in failed.items())
