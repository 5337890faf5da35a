"""A stand-in for the package `tensorrt_llm` (1.4): the LLM API as published, strict about its arguments, around the
mocker engine."""

import asyncio
import base64
import importlib
import os
import unittest.mock
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec

from engine_doubles import (
    Executor,
    KvCacheConfig,
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    LlmArgs,
    LlmRequest,
    RequestData,
)
from headwater.config.schema import EngineConfig
from headwater.protocol.request import SamplingParams as OurSampling
from headwater.protocol.request import SequenceOutput
from trtllm_model import Fabric, MockedExecutor

ARGUMENTS = {
    "backend",
    "cache_transceiver_config",
    "context_parallel_size",
    "custom_tokenizer",
    "enable_attention_dp",
    "enable_chunked_prefill",
    "enable_iter_perf_stats",
    "enable_lora",
    "gpus_per_node",
    "guided_decoding_backend",
    "kv_cache_config",
    "kv_connector_config",
    "lora_config",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "moe_cluster_parallel_size",
    "moe_config",
    "moe_expert_parallel_size",
    "otlp_traces_endpoint",
    "pipeline_parallel_size",
    "scheduler_config",
    "telemetry_config",
    "trust_remote_code",
}
KV_ARGUMENTS = {
    "dtype",
    "enable_block_reuse",
    "event_buffer_max_size",
    "free_gpu_memory_fraction",
    "max_gpu_total_bytes",
    "max_tokens",
    "tokens_per_block",
    "use_kv_cache_manager_v2",
}


CONNECTOR_ARGUMENTS = {"connector_module", "connector_scheduler_class", "connector_worker_class"}
"""Of `KvCacheConnectorConfig`, in every release since 1.0; there is no place for more."""


class RequestError(RuntimeError):
    pass


class Connected:
    """The KV connector of one executor, around a tiny engine: a prompt goes there as well as to the mocker.

    Both halves are made at the same time on two threads, as in `py_executor_creator.py`, and in a process to which only
    some of the environment comes along (`mpi_session.py`)."""

    passed_on: tuple[str, ...] = ("TRTLLM", "TLLM", "XDG_")

    def __init__(self, said: dict[str, Any], args: LlmArgs) -> None:
        if set(said) != CONNECTOR_ARGUMENTS:
            raise ValueError(f"KvCacheConnectorConfig: {sorted(set(said) ^ CONNECTOR_ARGUMENTS)}")
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(Connected.passed_on)}
        module = importlib.import_module(said["connector_module"])
        with unittest.mock.patch.dict(os.environ, passed_on, clear=True), ThreadPoolExecutor(2) as threads:
            worker = threads.submit(getattr(module, said["connector_worker_class"]), args)
            scheduler = threads.submit(getattr(module, said["connector_scheduler_class"]), args)
            self.executor = Executor(scheduler.result(), worker.result(), args)
        self.loaded: list[int] = []
        """Prompt tokens, by request."""
        self._module = module
        self._numbers = 0

    def run(self, prompt: list[int], salt: str | None, lora: int | None) -> None:
        computed, self._numbers = self.executor.computed, self._numbers + 1
        self.executor.run(LlmRequest(self._numbers, list(prompt), salt, lora), 1)
        self.loaded.append(len(prompt) - (self.executor.computed - computed))

    def close(self) -> None:
        self._module.detach_all()


@dataclass
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if sum(map(bool, (self.json, self.regex, self.grammar, self.json_object, self.structural_tag))) > 1:
            raise ValueError("Only one guide can be used for a request")


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    embedding_bias: Any = None
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    detokenize: bool = True
    add_special_tokens: bool = True


@dataclass(kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None

    def __post_init__(self) -> None:
        if self.request_type not in (None, "context_only", "generation_only", "context_and_generation"):
            raise ValueError(f"Unknown request type: {self.request_type}")


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    token_ids_diff: list[int] = field(default_factory=list[int])
    logprobs_diff: list[dict[int, Logprob]] = field(default_factory=list[dict[int, Logprob]])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: DisaggregatedParams | None = None


class RequestOutput:
    """Iterated or awaited once."""

    def __init__(self, llm: "LLM", prompt: list[int], params: SamplingParams, options: dict[str, Any]) -> None:
        self.outputs = [CompletionOutput()]
        self.cached_tokens = 0
        self.finished = False
        self._llm = llm
        self._prompt = prompt
        self._params = params
        self._options = options
        self._stream: int | None = None
        self._aborted = False
        self._given: list[SequenceOutput] = []

    def abort(self) -> None:
        self._aborted = True
        if self._stream is not None and self._llm.executor is not None:
            self._llm.executor.abort(self._stream)

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> "RequestOutput":
        if self.finished:
            raise StopAsyncIteration
        self._take(await self._next())
        return self

    def __await__(self) -> Any:
        return self._whole().__await__()

    async def _whole(self) -> "RequestOutput":
        while not self.finished:
            self._take(await self._next())
        return self

    async def _next(self) -> SequenceOutput:
        executor = await self._llm.started()
        if self._stream is None:
            self._stream = await self._submit(executor)
        if self._given:
            return self._given.pop()
        if self._aborted or self._stream not in executor.open:
            await asyncio.Event().wait()
        output = await executor.open[self._stream].answers.get()
        if output.error is not None:
            raise RequestError(output.error.message)
        return output

    async def _submit(self, executor: MockedExecutor) -> int:
        params, disaggregated = self._params, self._options["disaggregated_params"]
        first = None
        if disaggregated is not None and disaggregated.request_type == "generation_only":
            opaque = base64.b64encode(disaggregated.opaque_state).decode()
            first = self._llm.fabric.take(disaggregated.ctx_request_id, opaque, self._prompt)
            if first is None:
                if self._llm.fabric.hangs:
                    await asyncio.Event().wait()
                raise RequestError("KV cache transfer failed")
            self._given.append(SequenceOutput(0, [first], "length" if params.max_tokens == 1 else None))
        sampling = OurSampling(
            max_tokens=1 if self._context_only else max(params.max_tokens, 2 if first is not None else 1),
            temperature=1.0 if params.temperature is None else params.temperature,
            seed=params.seed or 0,
            stop_token_ids=params.stop_token_ids or [],
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
        )
        lora = self._options["lora_request"]
        if (connected := self._llm.connected) is not None:
            number = lora.lora_int_id if lora is not None else None
            await asyncio.to_thread(connected.run, self._prompt, self._options["cache_salt"], number)
        number = lora.lora_int_id if lora is not None else None
        return executor.submit(self._prompt, sampling, salt=self._options["cache_salt"], lora=number, first=first)

    @property
    def _context_only(self) -> bool:
        params = self._options["disaggregated_params"]
        return params is not None and params.request_type == "context_only"

    def _take(self, output: SequenceOutput) -> None:
        token_ids, stop_reason = list(output.token_ids), None
        if output.finish_reason == "stop" and output.stop_token_id is not None:
            stop_reason = output.stop_token_id if output.stop_token_id in (self._params.stop_token_ids or []) else None
            token_ids.append(output.stop_token_id)
        rows: list[dict[int, Logprob]] = []
        for number, token in enumerate(token_ids):
            one = output.logprobs[number] if output.logprobs and number < len(output.logprobs) else None
            pairs = zip(one.top_ids, one.top_logprobs, strict=True) if one is not None else ()
            row = {top: Logprob(value, rank) for rank, (top, value) in enumerate(pairs, 1)}
            rows.append(row or {token: Logprob(0.0, 1)})
        self.cached_tokens = output.num_cached_tokens or self.cached_tokens
        self.finished = output.finish_reason is not None
        found = CompletionOutput(token_ids, rows, output.finish_reason, stop_reason)
        if self._context_only:
            number, opaque = self._llm.fabric.keep(self._prompt, token_ids[0])
            state = base64.b64decode(opaque)
            found.disaggregated_params = DisaggregatedParams(
                request_type="context_only", first_gen_tokens=token_ids, ctx_request_id=number, opaque_state=state
            )
        self.outputs = [found]
        if self.finished and self._stream is not None and self._llm.executor is not None:
            self._llm.executor.finished(self._stream)


class LLM:
    """Its engine starts with the first request, since that is when there is an event loop."""

    made: "list[LLM]" = []  # noqa: RUF012 - for tests to find what the product has made
    fabric = Fabric()
    mocker = EngineConfig(mocker_decode_base_ms=2.0)

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        for name in kwargs:
            if name not in ARGUMENTS:
                raise ValueError(f"LLM got invalid argument: {name}")
        kv = kwargs.get("kv_cache_config") or {}
        if unknown := set(kv) - KV_ARGUMENTS:
            raise ValueError(f"KvCacheConfig: Extra inputs are not permitted: {sorted(unknown)}")
        sizes = {"max_batch_size": 2048, "max_num_tokens": 8192, "max_seq_len": None}
        self.args = SimpleNamespace(
            **(sizes | kwargs), model=model, dtype=dtype, tensor_parallel_size=tensor_parallel_size
        )
        block_size = kv.get("tokens_per_block", 32)
        config = msgspec.structs.replace(
            self.mocker,
            block_size=block_size,
            num_kv_blocks=kv["max_tokens"] // block_size if "max_tokens" in kv else 64,
            max_num_seqs=self.args.max_batch_size,
            max_num_batched_tokens=self.args.max_num_tokens,
            max_model_len=self.args.max_seq_len or 4096,
            enable_prefix_caching=kv.get("enable_block_reuse", True),
        )
        self.executor: MockedExecutor | None = None
        self.healthy = True
        self.requests: list[tuple[SamplingParams, dict[str, Any]]] = []
        connector = kwargs.get("kv_connector_config")
        self.connected = (
            Connected(connector, LlmArgs(model, kv_cache_config=KvCacheConfig(block_size))) if connector else None
        )
        second_manager = kv.get("use_kv_cache_manager_v2") is True
        events = kv.get("event_buffer_max_size", 0)
        self._mocked = MockedExecutor(config, events=events, second_manager=second_manager)
        self._starting: asyncio.Task[Any] | None = None
        self._stopped = False
        self._hf_model_config = SimpleNamespace(
            vocab_size=self.vocab_size, max_position_embeddings=4096, architectures=["DoubleForCausalLM"]
        )
        LLM.made.append(self)

    vocab_size = 276

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: None = None,
        streaming: bool = False,
        kv_cache_retention_config: None = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: None = None,
        scheduling_params: None = None,
        conversation_params: None = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        if self._stopped:
            raise RuntimeError("LLM is shutting down")
        if not all(isinstance(token, int) for token in inputs):
            raise TypeError("The inputs must be type str or list of int")
        if not 0 <= priority <= 1:
            raise ValueError(f"priority {priority} is not between 0 and 1")
        if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt.encode()):
            raise ValueError(f"cache_salt {cache_salt!r} is no text")
        if disaggregated_params is not None and "cache_transceiver_config" not in vars(self.args):
            raise ValueError("disaggregated_params needs a cache_transceiver_config")
        params = sampling_params or SamplingParams()
        options = {"lora_request": lora_request, "disaggregated_params": disaggregated_params}
        options |= {"cache_salt": cache_salt, "priority": priority}
        self.requests.append((params, options))
        return RequestOutput(self, list(inputs), params, options)

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Until none has come for so long."""
        executor = await self.started()
        quiet = 0.0
        while quiet < (timeout or 0.0):
            for stats in executor.drain_stats():
                quiet = 0.0
                yield stats
            await asyncio.sleep(0.01)
            quiet += 0.01

    async def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        executor = await self.started()
        for event in executor.drain_events():
            yield event
        raise IndexError("queue is empty")

    async def started(self) -> MockedExecutor:
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = asyncio.ensure_future(self._mocked.start())
        await asyncio.shield(self._starting)
        self.executor = self._mocked
        return self._mocked

    def shutdown(self) -> None:
        """From a thread, as it may take long."""
        self._stopped = True
        if self.connected is not None:
            self.connected.close()
        if self.executor is not None:
            asyncio.run_coroutine_threadsafe(self._mocked.close(), self._loop).result(10)

    def _check_health(self) -> bool:
        return self.healthy


def package(version: str = "1.4.0") -> dict[str, ModuleType]:
    """Modules by name."""
    top, llmapi, executor = (ModuleType(f"tensorrt_llm{end}") for end in ("", ".llmapi", ".executor"))
    top.__dict__.update(__version__=version, LLM=LLM, llmapi=llmapi, executor=executor)
    llmapi.__dict__.update(
        SamplingParams=SamplingParams,
        GuidedDecodingParams=GuidedDecodingParams,
        DisaggregatedParams=DisaggregatedParams,
    )
    executor.__dict__.update(LoRARequest=LoRARequest, RequestError=RequestError)
    parts = ("_torch", "pyexecutor", "connectors", "kv_cache_connector")
    inner = [ModuleType(".".join(("tensorrt_llm", *parts[:end]))) for end in range(1, len(parts) + 1)]
    inner[-1].__dict__.update(
        KvCacheConnectorScheduler=KvCacheConnectorScheduler,
        KvCacheConnectorWorker=KvCacheConnectorWorker,
        RequestData=RequestData,
    )
    return {module.__name__: module for module in (top, llmapi, executor, *inner)}
