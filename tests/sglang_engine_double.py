"""Stand-ins for the parts of the `sglang` package (0.5.23) that the in-worker engine uses, around the mocker engine.

Strict where SGLang is: `Engine.async_generate` knows its arguments and no others, the parser its flags; a name may only
be aborted once it is known, and all that begin with it are.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from engine_doubles import HiCacheStorage, install
from headwater.config.schema import EngineConfig
from headwater.protocol.events import WorkerEvent
from sglang_double import VERSION, GenerateBody, Lives, Publisher, SamplingBody
from sglang_hicache import HiCache


@dataclass
class ServerArgs:
    """As SGLang's: resolved when the engine starts."""

    model_path: str = ""
    tokenizer_path: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    page_size: int | None = None
    context_length: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    tp_size: int = 1
    mem_fraction_static: float | None = None
    disable_radix_cache: bool = False
    kv_events_config: str | None = None
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int = 8998
    base_gpu_id: int = 0
    pp_size: int = 1
    dp_size: int = 1
    nnodes: int = 1
    lora_paths: list[str] | None = None
    host: str = "127.0.0.1"
    enable_hierarchical_cache: bool = False
    hicache_ratio: float | None = None
    hicache_storage_backend: str | None = None
    hicache_storage_backend_extra_config: str | None = None
    enable_unified_cache_external_linker: bool = False
    speculative_algorithm: str | None = None
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    resolved: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model-path", "--model", required=True)
        parser.add_argument("--tokenizer-path")
        parser.add_argument("--revision")
        parser.add_argument("--dtype", default="auto", choices=["auto", "half", "float16", "bfloat16", "float32"])
        for flag in ("page-size", "context-length", "max-total-tokens", "max-running-requests", "chunked-prefill-size"):
            parser.add_argument(f"--{flag}", type=int)
        parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1)
        parser.add_argument("--pp-size", type=int, default=1)
        parser.add_argument("--dp-size", "--data-parallel-size", type=int, default=1)
        parser.add_argument("--base-gpu-id", type=int, default=0)
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--disaggregation-mode", default="null", choices=["null", "prefill", "decode"])
        parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--kv-events-config")
        parser.add_argument("--lora-paths", nargs="*")
        parser.add_argument("--hicache-ratio", type=float)
        parser.add_argument("--hicache-storage-backend", choices=["file", "mooncake", "dynamic"])
        parser.add_argument("--hicache-storage-backend-extra-config")
        parser.add_argument("--speculative-algorithm")
        parser.add_argument("--kv-cache-dtype", default="auto")
        parser.add_argument("--quantization")
        parser.add_argument("--enable-hierarchical-cache", "--enable-hicache", action="store_true")
        for flag in (
            "enable-unified-cache-external-linker",
            "disable-radix-cache",
            "incremental-streaming-output",
            "enable-deterministic-inference",
            "enable-priority-scheduling",
            "schedule-low-priority-values-first",
        ):
            parser.add_argument(f"--{flag}", action="store_true")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "ServerArgs":
        return cls(**vars(args))


class TokenizerManager:
    def __init__(self, lives: Lives, config: EngineConfig) -> None:
        self._lives = lives
        self.aborted: list[str] = []
        self.model_config = SimpleNamespace(
            context_len=lives._info.card.max_model_len,
            vocab_size=lives._info.card.vocab_size,
            dtype="torch.bfloat16",
            hf_config=SimpleNamespace(architectures=["DoubleForCausalLM"]),
        )
        self.failing = False

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        if rid in self._lives._names:
            self.aborted.append(rid)
            self._lives.abort(rid)

    async def get_loads(self, include: list[str] | None = None, dp_rank: int | None = None) -> list[Any]:
        if self.failing:
            raise RuntimeError("the shared memory is gone")
        return [SimpleNamespace(**rank) for rank in self._lives.loads()]


class Engine(Lives):
    """SGLang's `Engine`: made on a thread that has an event loop, which is not running yet."""

    mocker: ClassVar[EngineConfig]
    """What the next one is made of."""
    made: ClassVar[list["Engine"]] = []
    refusal: ClassVar[BaseException | None] = None

    def __init__(self, **kwargs: Any) -> None:
        if Engine.refusal is not None:
            raise Engine.refusal
        args = self.server_args = kwargs["server_args"]
        assert set(kwargs) == {"server_args"}
        sizes: dict[str, Any] = {
            "block_size": args.page_size or 1,
            "num_kv_blocks": (args.max_total_tokens or 0) // (args.page_size or 1),
            "max_num_seqs": args.max_running_requests,
            "max_num_batched_tokens": args.chunked_prefill_size,
            "max_model_len": args.context_length,
            "enable_prefix_caching": not args.disable_radix_cache,
        }
        known = {name: value for name, value in sizes.items() if value is not None and value != 0}
        super().__init__(msgspec.structs.replace(Engine.mocker, **known), incremental=args.incremental_streaming_output)
        if args.kv_events_config:
            told = json.loads(args.kv_events_config)
            self._publisher = Publisher(
                told.get("topic", ""), endpoint=told["endpoint"], replay_endpoint=told["replay_endpoint"]
            )
        self.loop = asyncio.get_event_loop_policy().get_event_loop()
        self.loop.run_until_complete(self.begin())
        self.tokenizer_manager = TokenizerManager(self, self._config)
        self.down = False
        self.hicache = (
            HiCache(args.page_size, json.loads(args.hicache_storage_backend_extra_config or "{}"), args.tp_size)
            if args.enable_hierarchical_cache
            else None
        )
        Engine.made.append(self)

    async def async_generate(
        self,
        prompt: str | None = None,
        sampling_params: dict[str, Any] | None = None,
        input_ids: list[int] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        lora_path: str | None = None,
        stream: bool = False,
        bootstrap_host: str | None = None,
        bootstrap_port: int | None = None,
        bootstrap_room: int | None = None,
        rid: str | None = None,
        priority: int | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        assert prompt is None
        assert stream
        return self._tokenized(
            GenerateBody(
                input_ids=input_ids or [],
                sampling_params=msgspec.convert(sampling_params, SamplingBody),
                rid=rid,
                stream=stream,
                return_logprob=return_logprob,
                top_logprobs_num=top_logprobs_num or 0,
                lora_path=lora_path,
                priority=priority,
                cache_salt=cache_salt,
            )
        )

    async def _tokenized(self, body: GenerateBody) -> AsyncIterator[dict[str, Any]]:
        await asyncio.sleep(0.001)  # its name is not known before
        if self.hicache is not None:
            await self.loop.run_in_executor(self.hicache.thread, self.hicache.prefetch, body.input_ids, body.cache_salt)
        answer: list[int] = []
        async for chunk in self.generate(body):
            answer += chunk["output_ids"]
            yield chunk
        if self.hicache is not None:
            # The KV of the last token is not computed.
            await self.loop.run_in_executor(
                self.hicache.thread, self.hicache.backup, body.input_ids, answer[:-1], body.cache_salt
            )

    def _in_its_words(self, event: WorkerEvent) -> list[dict[str, Any]]:
        """HiCache has all in its own host memory too, until it goes there as well."""
        told = super()._in_its_words(event)
        if not self.server_args.enable_hierarchical_cache:
            return told
        return [*told, *({**word, "medium": "CPU_PINNED"} for word in told)]

    def get_server_info(self) -> dict[str, Any]:
        async def state() -> list[dict[str, Any]]:
            return [{}]

        args = self.server_args
        return {
            **{name: value for name, value in vars(args).items() if name != "resolved"},
            "max_total_num_tokens": self._info.kv_blocks * self._config.block_size,
            "max_req_input_len": self._info.card.max_model_len - 6,
            "internal_states": self.loop.run_until_complete(state()),
            "version": VERSION,
        }

    def shutdown(self) -> None:
        self.down = True
        self.loop.run_until_complete(self.end())
        if self._publisher is not None:
            self._publisher.close()
        if self.hicache is not None:
            self.hicache.close()


def installed(monkeypatch: pytest.MonkeyPatch, mocker: EngineConfig, version: str = VERSION) -> None:
    """The package, as if it were installed in that version."""
    monkeypatch.setattr(Engine, "mocker", mocker, raising=False)
    monkeypatch.setattr(Engine, "made", [])
    install(monkeypatch, "sglang.srt.server_args", ServerArgs=ServerArgs)
    install(monkeypatch, "sglang.srt.entrypoints.engine", Engine=Engine)
    install(monkeypatch, "sglang.srt.mem_cache.hicache_storage", HiCacheStorage=HiCacheStorage)
    monkeypatch.setitem(sys.modules, "headwater.kv.connectors.sglang", None)
    monkeypatch.delitem(sys.modules, "headwater.kv.connectors.sglang")
    monkeypatch.setattr("headwater.engines.sglang.installed.version", lambda name: version)
