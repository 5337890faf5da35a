"""The whole test of the official OpenAI client, on vLLM in the worker; for whoever has vLLM and the demo model for it:

bench/peers/setup vllm demo
VLLM_PYTHON=build/peers/vllm/bin/python pytest -m vllm
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import served_demo
from test_openai_client import *  # noqa: F403 - its tests, with another cluster

from real_vllm import VLLM_PYTHON, needs_vllm

DEMO = Path(os.environ.get("PEERS", Path(__file__).parents[2] / "build/peers")) / "demo"
FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32"]

pytestmark = needs_vllm(600)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("c")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")},
        "XDG_RUNTIME_DIR": str(folder),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(VLLM_PYTHON), "-m", "headwater", "serve", str(DEMO), "--engine", "vllm", "--port", "0", *FLAGS]
    command += ["--served-model-name", "smollm2-135m-instruct"]
    log = folder / "serve.log"
    with log.open("w") as output, pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_demo, "START_TIMEOUT_S", 400.0)
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            yield served_demo._url_once_ready(process, log)
        finally:
            process.terminate()
            process.wait(60)
