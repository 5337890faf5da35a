"""The KV store under real vLLM, over restarts. See `real_vllm`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kv_process import store_process
from real_vllm import VLLM_PYTHON, needs_vllm, tiny_model

LIFE = Path(__file__).parent.parent / "vllm_store_life.py"
TOKENS, BLOCK = 1000, 32

pytestmark = needs_vllm(900)


def life(socket: Path, model: Path, *words: str) -> list[dict[str, Any]]:
    """A process of vLLM from its beginning to its end: what it answered."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(LIFE.parent)
    command = [str(VLLM_PYTHON), str(LIFE), str(socket), str(model), str(TOKENS), *words]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b'{"tokens"')]


def test_a_restarted_engine_gets_its_prefix_back(tmp_path: Path, run_folder: Path) -> None:
    model, socket = tiny_model(tmp_path), run_folder / "kv.sock"
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
    model, socket = tiny_model(tmp_path, num_kv_heads), run_folder / "kv.sock"
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
