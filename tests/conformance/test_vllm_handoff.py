"""Prefill and decode on two real vLLM workers. See `real_vllm`."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from real_vllm import VLLM_PYTHON, needs_vllm, tiny_model

ROOT = Path(__file__).parents[2]
LIFE = ROOT / "tests/vllm_handoff_life.py"

pytestmark = needs_vllm(600)


def test_prefill_on_one_decode_on_another(tmp_path: Path) -> None:
    live(tmp_path, num_kv_heads=1, sizes=(1, 1))


@pytest.mark.parametrize(("num_kv_heads", "sizes"), [(2, (1, 2)), (1, (2, 1))], ids=["divided", "repeated"])
def test_prefill_and_decode_at_unequal_tensor_parallel_sizes(
    tmp_path: Path, num_kv_heads: int, sizes: tuple[int, int]
) -> None:
    live(tmp_path, num_kv_heads, sizes)


def live(folder: Path, num_kv_heads: int, sizes: tuple[int, int]) -> None:
    """All checks of `vllm_handoff_life` for these sizes of the prefill and the decode worker."""
    tiny_model(folder, num_kv_heads)
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}/bench"
    command = [str(VLLM_PYTHON), str(LIFE), str(folder), "--sizes", *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b'{"check"')]
    assert len(results) == 8, done.stderr.decode()[-3000:]
    failed = {found["check"]: found["detail"] for found in results if found["result"] == "failed"}
    assert not failed, "\n".join(f"{name}: {detail}" for name, detail in failed.items())
