"""The engine suite on real vLLM, one engine start per form. See `real_vllm`."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from real_vllm import VLLM_PYTHON, needs_vllm, tiny_model

SUITE = Path(__file__).parent.parent / "vllm_suite.py"

pytestmark = needs_vllm(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


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
