"""The assembled native engine on a tiny random model: what it tells of itself, what it refuses, its fallback."""

import asyncio
import json
import os
import shutil
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo, Placement, Progress
from headwater.engines.native.cpu import backend as cpu_backend
from headwater.engines.native.cpu.library import KernelsUnavailable
from headwater.engines.native.engine import NativeEngine, build_engine
from headwater.errors import ConfigError, HeadwaterError, ModelError
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput, StructuredSpec

SIZES = EngineConfig(device="cpu", num_kv_blocks=64, max_model_len=96, max_num_seqs=8, threads=1)


@pytest.fixture
def config(tiny_model: "Callable[..., Any]", tmp_path: Path) -> EngineConfig:
    return msgspec.structs.replace(
        SIZES, model=str(tiny_model("llama").folder), weights_cache=str(tmp_path / "weights")
    )


class Listener:
    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.failures: list[HeadwaterError] = []
        self.ended = 0
        self.changed = asyncio.Event()

    def on_step(self, outputs: list[SequenceOutput]) -> None:
        self.outputs += outputs
        self.ended += sum(output.finish_reason is not None for output in outputs)
        self.changed.set()

    def on_events(self, events: list[Any]) -> None:
        pass

    def on_failed(self, error: HeadwaterError) -> None:
        self.failures.append(error)
        self.changed.set()

    def tokens(self, stream: int) -> list[int]:
        return [token for output in self.outputs if output.stream == stream for token in output.token_ids]


def serve(config: EngineConfig, requests: list[EngineRequest]) -> tuple[EngineInfo, Listener, list[Progress]]:
    """Start, run the requests to their ends, close."""

    async def run() -> tuple[EngineInfo, Listener, list[Progress]]:
        engine, listener, progress = NativeEngine(config), Listener(), []
        info = await engine.start(listener, progress.append)
        engine.submit(requests)
        while listener.ended < len(requests) and not listener.failures:
            listener.changed.clear()
            await asyncio.wait_for(listener.changed.wait(), 30)
        await engine.close()
        return info, listener, progress

    return asyncio.run(run())


def request(stream: int, prompt: list[int], **sampling: Any) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **sampling})
    return EngineRequest(stream, f"r{stream}", "m", array("I", prompt).tobytes(), params)


def test_the_card_tells_what_was_loaded(config: EngineConfig, tiny_model: "Callable[..., Any]") -> None:
    info, _, progress = serve(config, [])
    card = info.card
    resolved = tiny_model("llama").resolved
    assert card.name == Path(resolved.name).name
    assert card.fingerprint == resolved.fingerprint
    assert card.architecture == "LlamaForCausalLM"
    assert card.dtype == "float32"
    assert card.eos_token_ids == [2]
    assert card.vocab_size == 300
    assert card.max_model_len == 96
    assert card.kv_layout.startswith("hw1.f32.l3.h2.d16.b16")
    assert card.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert card.num_parameters == sum(parameter.numel() for parameter in tiny_model("llama").reference.parameters())
    tokenizer = next(artifact for artifact in card.artifacts if artifact.name == "tokenizer.json")
    assert info.artifacts[tokenizer.digest] == resolved.tokenizer_json
    assert info.batch_invariant
    assert info.engine == "native"
    assert info.max_num_batched_tokens == 8 + 64
    assert info.hardware.startswith("cpu-")
    assert info.hardware.endswith("-1t")
    phases = list(dict.fromkeys(step.phase for step in progress))
    assert phases[0] == "resolve"
    assert phases[-2:] == ["warm", "ready"]


def test_served_names_come_from_the_configuration(config: EngineConfig) -> None:
    info, _, _ = serve(msgspec.structs.replace(config, served_model_name=("one", "two")), [])
    assert (info.card.name, info.card.served_names) == ("one", ["one", "two"])


def test_structured_output_end_to_end(config: EngineConfig, tiny_model: "Callable[..., Any]") -> None:
    """Weights are random, so only the grammar can make this JSON. It ends when it is complete, asked to or not."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 999}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    spec = StructuredSpec("json_schema", json.dumps(schema))
    wanted = {"max_tokens": 90, "temperature": 1.0, "structured": spec}
    requests = [request(n, [5 + n, 6], seed=n, ignore_eos=n % 2 == 0, **wanted) for n in range(6)]
    bad = request(6, [5], structured=StructuredSpec("json_schema", '{"type": "nothing"}', "guided_json"))
    _, listener, _ = serve(config, [*requests, bad])
    tokenizer = Tokenizer.from_str(tiny_model("llama").resolved.tokenizer_json.decode())
    last = {output.stream: output for output in listener.outputs}
    complete = [n for n in range(6) if last[n].finish_reason == "stop"]
    assert {n % 2 for n in complete} == {0, 1}
    for n in complete:
        value = json.loads(tokenizer.decode(listener.tokens(n)))
        assert value["b"] in ("x", "yy")
        assert value["a"] <= 999
        assert last[n].stop_token_id == 2
    error = last[6].error
    assert error is not None
    assert (error.http_status, error.param) == (400, "guided_json")
    assert "nothing" in error.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 2}, "1 device"),
        ({"dtype": "bfloat16"}, "--dtype float32"),
        ({"max_model_len": 97}, "96 positions"),
        ({"threads": 100_000}, "CPUs on this host"),
        ({"num_kv_blocks": 5}, "--max-model-len 80"),
        ({"max_num_batched_tokens": 20}, "max_num_batched_tokens"),
        ({"block_size": 10}, "block size 10"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: EngineConfig, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serve(msgspec.structs.replace(config, **changes), [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        serve(msgspec.structs.replace(config, device="cuda"), [])


def test_without_kernels_torch_computes(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(10, 40))
    _, with_kernels, _ = serve(config, [request(1, prompt)])

    def unavailable(*_: Any) -> None:
        raise KernelsUnavailable("no compiler")

    monkeypatch.setattr(cpu_backend, "load_library", unavailable)
    info, with_torch, _ = serve(config, [request(1, prompt)])
    assert not info.batch_invariant
    assert "torch" in info.hardware
    assert with_torch.tokens(1) == with_kernels.tokens(1)


def test_damaged_weights_are_found_at_start(
    config: EngineConfig, tiny_model: "Callable[..., Any]", tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_model("llama").folder, folder, ignore=shutil.ignore_patterns("cache"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match="not finite"):
        serve(msgspec.structs.replace(config, model=str(folder)), [])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_two_engines_compute_on_different_cores(config: EngineConfig) -> None:
    """The thread that builds is bound, with all it starts; the caller is not."""
    before = os.sched_getaffinity(0)
    cores: list[set[int]] = []

    def build(index: int) -> None:
        built = build_engine(config, Placement(index, 2), lambda _: None)
        cores.append(os.sched_getaffinity(threading.get_native_id()))
        built.executor.close()

    for index in range(2):
        thread = threading.Thread(target=build, args=(index,))
        thread.start()
        thread.join()
    assert cores[0].isdisjoint(cores[1])
    assert os.sched_getaffinity(0) == before
