"""Which cores the ranks of a vLLM on a CPU get, and which part of the memory."""

import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine_doubles import install
from headwater.config.schema import EngineConfig
from headwater.engines.base import Placement

NAME = "headwater.engines.vllm.arguments"


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    install(monkeypatch, "vllm.config", KVTransferConfig=None)
    install(monkeypatch, "vllm.config.kv_events", KVEventsConfig=None)
    install(monkeypatch, "vllm.engine.arg_utils", AsyncEngineArgs=None)
    install(monkeypatch, "vllm.entrypoints.launchers.cli_args", FrontendArgs=None, make_arg_parser=None)
    install(monkeypatch, "vllm.utils.argparse_utils", FlexibleArgumentParser=object)
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


@pytest.mark.parametrize(
    ("num_cores", "place", "ranks", "threads", "bound"),
    [
        (8, (0, 1), 1, 0, "0,1,2,3,4,5,6"),
        (8, (1, 2), 1, 0, "1,3,5"),
        (8, (0, 1), 2, 0, "0,1,2|3,4,5"),
        (8, (0, 2), 2, 0, "0|2"),
        (8, (0, 1), 4, 2, "0,1|2,3|4,5|6,7"),
        (2, (0, 1), 2, 0, "0|1"),
        (2, (0, 1), 2, 2, "nobind"),
        (2, (0, 2), 2, 0, "nobind"),
        (1, (1, 2), 1, 0, "nobind"),
    ],
)
def test_each_rank_has_cores_of_its_own(
    arguments: Any,
    monkeypatch: pytest.MonkeyPatch,
    num_cores: int,
    place: tuple[int, int],
    ranks: int,
    threads: int,
    bound: str,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(os, "environ", {})
    arguments.bind_cores(EngineConfig(threads=threads or None), Placement(*place), ranks)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == bound
    assert os.environ.get("OMP_NUM_THREADS") == (str(threads or 1) if bound == "nobind" else None)


def test_memory_is_divided_among_instances_and_ranks(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(available=90 << 30, total=100 << 30)
    monkeypatch.setattr(arguments.psutil, "virtual_memory", lambda: free)
    assert arguments.memory_share(Placement(0, 1), 1) == ["--gpu-memory-utilization", "0.810"]
    assert arguments.memory_share(Placement(0, 2), 2, 5 << 30) == ["--gpu-memory-utilization", "0.180"]
