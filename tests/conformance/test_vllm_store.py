"""The KV store under real vLLM, over restarts; for whoever has vLLM:

VLLM_PYTHON=build/peers/vllm/bin/python pytest -m vllm      (bench/peers/setup vllm makes that interpreter)
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import model_fixtures
from kv_process import store_process

LIFE = Path(__file__).parent.parent / "vllm_store_life.py"
VLLM_PYTHON = os.environ.get("VLLM_PYTHON")
TOKENS, BLOCK = 1000, 32

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(VLLM_PYTHON is None, reason="VLLM_PYTHON names no interpreter with vLLM"),
]


def model_with(num_kv_heads: int, folder: Path) -> Path:
    """Of a shape that vLLM's CPU kernels take."""
    heads = {"head_dim": 32, "num_attention_heads": 2 * num_kv_heads, "num_key_value_heads": num_kv_heads}
    shape = {"max_position_embeddings": 1024, **heads}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model_fixtures.FAMILIES, "llama", ("Llama", {"tie_word_embeddings": True, **shape}))
        model_fixtures.build_tiny_model(folder, "llama", "default")
    return folder


def life(socket: Path, model: Path, *words: str) -> list[dict[str, Any]]:
    """A process of vLLM from its beginning to its end: what it answered."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(LIFE.parent)
    command = [str(VLLM_PYTHON), str(LIFE), str(socket), str(model), str(TOKENS), *words]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b'{"tokens"')]


def test_a_restarted_engine_gets_its_prefix_back(tmp_path: Path, run_folder: Path) -> None:
    model, socket = model_with(1, tmp_path), run_folder / "kv.sock"
    with store_process(socket):
        computed = life(socket, model)
        assert [one["cached"] for one in computed] == [0, 0]
        restarted = life(socket, model)
        assert [one["cached"] for one in restarted] == [(TOKENS - 1) // BLOCK * BLOCK] * 2
        assert [one["tokens"] for one in restarted] == [one["tokens"] for one in computed]
        short = life(socket, model, "--connector", "ShortConnector")
        assert [one["tokens"] for one in short] == [one["tokens"] for one in computed], "what did not come was computed"
        damaged = life(socket, model, "--connector", "DamagingConnector")
        assert damaged[0]["cached"] > 0
        assert [one["tokens"] for one in damaged] != [one["tokens"] for one in computed], "the control"


@pytest.mark.parametrize(("num_kv_heads", "sizes"), [(2, ("1", "2")), (1, ("2", "1"))], ids=["divided", "repeated"])
def test_an_engine_of_another_tensor_parallel_size_gets_the_prefix(
    num_kv_heads: int, sizes: tuple[str, str], tmp_path: Path, run_folder: Path
) -> None:
    model, socket = model_with(num_kv_heads, tmp_path), run_folder / "kv.sock"
    first, second = (("--size", size) for size in sizes)
    with store_process(socket):
        computed = life(socket, model, *first)
        assert [one["cached"] for one in computed] == [0, 0]
        restarted = life(socket, model, *second)
        assert [one["cached"] for one in restarted] == [(TOKENS - 1) // BLOCK * BLOCK] * 2
        assert [one["tokens"] for one in restarted] == [one["tokens"] for one in computed]
        damaged = life(socket, model, *second, "--connector", "DamagingConnector")
        assert damaged[0]["cached"] > 0
        assert [one["tokens"] for one in damaged] != [one["tokens"] for one in computed], "the control"
