"""`VllmEngine`: vLLM's engine core driven from the worker process, token ids in and out, no second HTTP hop.

vLLM's parts that are used: its argument parser, `AsyncLLM` for starting and stopping, its input processor (which
checks requests), and the client of its engine core, whose output is one message per step: so ours is one per step too,
whatever the number of sequences, and vLLM's detokenizer and per-request tasks are not in the way. KV events come over
the engine core's own socket, a moment before or after the step that caused them.

Batches are not invariant: a moved sequence goes on with what vLLM makes of prompt and output so far.
"""

import asyncio
import logging
import os
import secrets
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from headwater.config.schema import EngineConfig
from headwater.engines.base import ALONE, EngineInfo, Placement, Progress, ProgressSink
from headwater.engines.external import ExternalEngine, OpenStream
from headwater.engines.kv_feed.following import Following
from headwater.engines.kv_feed.subscription import FeedAddress
from headwater.engines.kv_feed.translate import FeedTranslator, salt_of
from headwater.engines.kv_params import kv_transfer_params, ticket_of
from headwater.engines.limits import num_resumed
from headwater.engines.starting import pulse, starting
from headwater.engines.steps import PrefillProgress
from headwater.engines.texts import texts_and_weights
from headwater.engines.vllm.arguments import (
    VllmArguments,
    bind_cores,
    events_config,
    memory_share,
    vllm_arguments,
)
from headwater.engines.vllm.connectors import NO_CONNECTORS, connectors
from headwater.engines.vllm.describe import engine_info
from headwater.engines.vllm.guard import Guard
from headwater.engines.vllm.outputs import sequence_output
from headwater.engines.vllm.port import StagingPort
from headwater.engines.vllm.sampling import refusal, vllm_sampling
from headwater.engines.vllm.staging import Staging
from headwater.errors import ConfigError, EngineFailed, HeadwaterError, InternalError, InvalidRequest
from headwater.kv.connectors.vllm_naming import request_params
from headwater.protocol.cluster import ModelCard
from headwater.protocol.events import LoadReport
from headwater.protocol.request import EngineRequest
from headwater.runtime.owned_folder import OwnedFolder

_SHUTDOWN_TIMEOUT_S = 8.0


class VllmEngine(ExternalEngine):
    """See `headwater.engines.base.Engine`."""

    def __init__(self, config: EngineConfig, placement: Placement = ALONE) -> None:
        super().__init__(config)
        self._placement = placement
        self._llm: AsyncLLM | None = None
        self._names: dict[str, int] = {}
        """Streams by what vLLM calls them."""
        self._waiting: set[int] = set()
        """Streams of which nothing has come."""
        self._outbox: asyncio.Queue[EngineCoreRequest | list[str]] = asyncio.Queue()
        """Bounded by the open streams."""
        self._progress = PrefillProgress()
        self._stats: Any = None
        self._nonce = secrets.token_hex(4)
        self._following: Following | None = None
        self._folder: OwnedFolder | None = None
        self._guard = Guard()
        self._staging: Staging | None = None
        self._port: StagingPort | None = None
        self._connectors = NO_CONNECTORS

    # ---- life

    async def open_engine(self, progress: ProgressSink) -> EngineInfo:
        texts, model = await asyncio.to_thread(texts_and_weights, self.config, "vllm", progress)
        if self.config.kv_staging:
            self._staging = Staging(self.config.kv_staging)
        await asyncio.to_thread(self._guard.start)
        arguments = await asyncio.to_thread(self._arguments, model)
        async with pulse("vLLM", progress):
            llm: AsyncLLM = await asyncio.to_thread(_start, arguments)
        self._llm = llm
        await asyncio.to_thread(self._guard.settle)
        self._tasks_supported = await llm.get_supported_tasks()
        self._adapters = {name: number for number, name in enumerate(arguments.adapters, 1)}
        self._adapter_paths = arguments.adapters
        if self._staging is not None:
            await self._staging.registered()
        info = engine_info(self.config, texts, llm, list(self._adapters), self._staging, self._connectors)
        card = info.card
        if self._staging is not None:
            self.kv = self._port = StagingPort(self._staging, self, card.block_size)
        self._follow_events(llm, card)
        self.spawn(self._send_all())
        self.spawn(self._receive_all())
        progress(Progress("ready", detail=card.name))
        return info

    async def close_engine(self) -> None:
        if self._following is not None:
            await self._following.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN_TIMEOUT_S)
        await asyncio.to_thread(self._guard.close)
        if self._port is not None:
            self._port.close()
        if self._staging is not None:
            self._staging.close()
        if self._folder is not None:
            self._folder.close()

    def _arguments(self, model: str) -> VllmArguments:
        arguments = vllm_arguments(self.config, model, self._defaults)
        engine = arguments.engine
        handoff = self._staging.connector(os.getpid()) if self._staging is not None else None
        self._connectors = connectors(engine.kv_transfer_config, handoff, self._placement.store)
        engine.kv_transfer_config = self._connectors.config
        if not arguments.events_given and engine.enable_prefix_caching is not False:
            self._folder = OwnedFolder("vllm-events-")
            engine.kv_events_config = (
                events_config(f"ipc://{self._folder.path}/events", f"ipc://{self._folder.path}/replay")
                if engine.data_parallel_size == 1
                else events_config("tcp://*:0", "tcp://*:0")
            )
        return arguments

    def _defaults(self, num_ranks: int) -> list[str]:
        """What vLLM is told about this host unless flags do."""
        if not current_platform.is_cpu():
            return []
        bind_cores(self.config, self._placement, num_ranks)
        return memory_share(self._placement, num_ranks, self.config.kv_staging or 0)

    def _follow_events(self, llm: AsyncLLM, card: ModelCard) -> None:
        addresses = [
            FeedAddress.published(source.endpoint, source.topic, source.replay_endpoint, "127.0.0.1")
            for source in llm.get_kv_event_sources().values()
            if source.publisher == "zmq"
        ]
        if addresses:
            translator = FeedTranslator(card.fingerprint, card.kv_layout, card.block_size)
            self._following = Following("vLLM", addresses, translator, self.tell)

    # ---- work

    def send(self, stream: OpenStream, tokens: "array[int]") -> None:
        num_resumed(stream.request)  # refuses what is complete
        if self._port is None:
            self.hand_over(stream, tokens, None)
        elif not self._port.begin(stream, tokens):
            self.hand_over(stream, tokens, self._port.export(stream, len(tokens)))

    def hand_over(self, stream: OpenStream, tokens: "array[int]", params: dict[str, Any] | None) -> None:
        """`params`: for vLLM's KV connector. Raises `HeadwaterError` to refuse it."""
        number = stream.request.stream
        name = f"{self._nonce}-{number}"
        self._names[name] = number
        self._waiting.add(number)
        if stream.request.sampling.structured is None:
            try:
                self._outbox.put_nowait(self._checked(name, stream, tokens, params))
            except HeadwaterError:
                self._unsent(number)
                raise
        else:
            self.spawn(self._send_structured(name, stream, tokens, params))

    def cancel(self, streams: Sequence[int]) -> None:
        port = self._port
        names = [self._drop(stream) for stream in streams if port is None or not port.cancelled(stream)]
        self._outbox.put_nowait(names)

    def load(self) -> LoadReport:
        stats, num_open, num_blocks = self._stats, len(self.open), self.info.kv_blocks
        running = min(stats.num_running_reqs, num_open) if stats is not None else 0
        usage = stats.kv_cache_usage if stats is not None and num_open else 0.0
        return self.load_report(
            num_running=running,
            num_waiting=num_open - running,
            kv_blocks_free=num_blocks - round(usage * num_blocks),
        )

    def _checked(
        self, name: str, stream: OpenStream, tokens: "array[int]", params: dict[str, Any] | None
    ) -> EngineCoreRequest:
        """What vLLM's input processor makes of it. Raises `InvalidRequest` with what vLLM says."""
        request, llm = stream.request, self._llm
        assert llm is not None
        resumed = num_resumed(request)
        salt = salt_of(request.namespace, self.default_namespace)
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": tokens.tolist()}
        if salt is not None:
            prompt["cache_salt"] = salt
        try:
            return llm.input_processor.process_inputs(
                name,
                prompt,
                vllm_sampling(request.sampling, resumed, self._kv_params(request, params)),
                self._tasks_supported,
                arrival_time=request.arrival or None,
                lora_request=self._adapter(request.adapter),
                priority=-request.priority,
                session_id=request.session_id,
            )
        except HeadwaterError:
            raise
        except (VLLMClientError, ValueError, TypeError) as error:
            raise refusal(error) from error
        except Exception as error:
            raise InternalError(f"vLLM could not make sense of this request: {error!r}") from error

    def _kv_params(self, request: EngineRequest, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """All that vLLM's connectors are told of a request. Raises `InvalidRequest` for a ticket that is none."""
        if self._port is None:
            params = kv_transfer_params(request)
        if not self._connectors.store:
            return params
        return request_params(self.naming(request), params)

    async def _send_structured(
        self, name: str, stream: OpenStream, tokens: "array[int]", params: dict[str, Any] | None
    ) -> None:
        """A grammar may take long to check, which must not hold up the others."""
        number = stream.request.stream
        try:
            checked = await asyncio.to_thread(self._checked, name, stream, tokens, params)
        except HeadwaterError as error:
            self._unsent(number)
            self.end(number, error)
            return
        if number in self.open:
            self._outbox.put_nowait(checked)
        else:
            self._unsent(number)

    def _adapter(self, name: str | None) -> LoRARequest | None:
        if name is None:
            return None
        number = self._adapters.get(name)
        if number is None:
            known = ", ".join(self._adapters) or "none is loaded"
            raise InvalidRequest(f"there is no adapter {name!r}: {known}", param="model")
        return LoRARequest(name, number, self._adapter_paths[name])

    async def _send_all(self) -> None:
        """One sender, so that an abort never overtakes what it aborts."""
        while True:
            message = await self._outbox.get()
            llm = self._llm
            if llm is None:
                return
            try:
                if isinstance(message, list):
                    await llm.engine_core.abort_requests_async(message)
                else:
                    await llm.engine_core.add_request_async(message)
            except EngineDeadError as error:
                self.fail(EngineFailed(f"vLLM's engine core has died: {error}"))
                return

    async def sleep(self) -> None:
        """Weights go to host memory, KV is dropped (vLLM's level 1, `--enable-sleep-mode`)."""
        await self._told(lambda llm: llm.sleep(1))

    async def wake(self) -> None:
        await self._told(lambda llm: llm.wake_up())

    async def _told(self, tell: Callable[[AsyncLLM], Awaitable[object]]) -> None:
        assert self._llm is not None
        try:
            await tell(self._llm)
        except EngineDeadError as error:
            raise EngineFailed(f"vLLM's engine core has died: {error}") from error
        except Exception as error:
            raise ConfigError(f"vLLM: {error}", hint="--enable-sleep-mode, on a device that has it") from error

    # ---- what comes back

    async def _receive_all(self) -> None:
        llm = self._llm
        assert llm is not None
        while True:
            try:
                self._on_outputs(await llm.engine_core.get_output_async())
            except EngineDeadError as error:
                self.fail(EngineFailed(f"vLLM's engine core has died: {error}"))
                return

    def _on_outputs(self, step: EngineCoreOutputs) -> None:
        stats = step.scheduler_stats
        if stats is not None:
            self._stats = stats
            done = stats.iteration_details
            if done is not None and not done.is_dummy:
                counts = int(done.num_ctx_tokens), int(done.num_generation_requests)
                self.time_step(self._progress.timing(*counts, float(done.elapsed_ms), self._at_vllm()))
        told = []
        for output in step.outputs:
            number = self._names.get(output.request_id)
            stream = None if number is None else self.open.get(number)
            if number is None or stream is None:
                continue
            if output.events:
                self.totals.preemptions += sum(event.type == EngineCoreEventType.PREEMPTED for event in output.events)
            first = number in self._waiting
            wanted = stream.request.sampling.logprobs is not None
            translated = sequence_output(number, output, first=first, logprobs=wanted)
            if not translated.token_ids and translated.finish_reason is None:
                continue
            if output.kv_transfer_params and stream.request.export is not None:
                translated.ticket = ticket_of(output.kv_transfer_params)
            self._waiting.discard(number)
            if translated.finish_reason is not None:
                self._drop(number)
            told.append(translated)
        if self._port is not None:
            told = self._port.leaving(told)
        self.deliver(told)

    # ---- inner life

    def _at_vllm(self) -> Mapping[int, OpenStream]:
        """Streams that vLLM has."""
        port = self._port
        if port is None or not port.loading:
            return self.open
        return {number: stream for number, stream in self.open.items() if not port.waits_for_kv(number)}

    def _unsent(self, stream: int) -> None:
        self._drop(stream)
        if self._port is not None:
            self._port.unsent(stream)

    def _drop(self, stream: int) -> str:
        name = f"{self._nonce}-{stream}"
        self._names.pop(name, None)
        self._waiting.discard(stream)
        return name


def _start(arguments: VllmArguments) -> AsyncLLM:
    """In a thread without an event loop: `AsyncLLM` then leaves the reading of outputs to us."""
    logging.logProcesses = logging.logMultiprocessing = True  # vLLM's lines name the process
    with starting("vLLM"):
        return AsyncLLM.from_engine_args(arguments.engine, usage_context=UsageContext.ENGINE_CONTEXT)
