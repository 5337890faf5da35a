"""`TrtllmEngine`: TensorRT-LLM's `LLM` driven from the worker process, token ids in and out, no HTTP hop.

A sequence is one `generate_async` with a task that reads it. KV events and iteration statistics are taken out of
queues that this process alone reads. Batches are not invariant: a moved sequence goes on with what TensorRT-LLM makes
of prompt and output so far.
"""

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from headwater.config.schema import EngineConfig
from headwater.engines.base import ALONE, EngineInfo, Placement, Progress, ProgressSink
from headwater.engines.external import ExternalEngine, OpenStream
from headwater.engines.gathered import Gathered
from headwater.engines.kv_feed.draining import Draining
from headwater.engines.kv_feed.owners import BlockOwners
from headwater.engines.kv_feed.translate import FeedTranslator, salt_of
from headwater.engines.starting import pulse, starting
from headwater.engines.steps import PrefillProgress
from headwater.engines.texts import texts_and_weights
from headwater.engines.trtllm.arguments import TrtllmArguments, trtllm_arguments
from headwater.engines.trtllm.describe import engine_info
from headwater.engines.trtllm.handing_over import HandingOver
from headwater.engines.trtllm.installed import Installed, load_installed
from headwater.engines.trtllm.outputs import OutputReader
from headwater.engines.trtllm.sampling import trtllm_sampling
from headwater.engines.trtllm.store import AttachedStore
from headwater.engines.trtllm_words import adapter_number, priority_of
from headwater.errors import EngineFailed, HeadwaterError, InvalidRequest, WorkerLost
from headwater.kv.identity import namespace
from headwater.kv.pricing import ComputeRate
from headwater.protocol.cluster import ModelCard
from headwater.protocol.events import LoadReport
from headwater.protocol.request import EngineRequest, SequenceOutput

_log = logging.getLogger(__name__)

_WARM_TIMEOUT_S = 120.0
_TICKET_S = 60.0
"""Until the first token: longer than TensorRT-LLM itself waits for KV (`kv_transfer_timeout_ms`)."""
_STATS_WAIT_S = 0.5
_STATS_PAUSE_S = 0.05
_HEALTH_S = 1.0
_SHUTDOWN_TIMEOUT_S = 15.0


class TrtllmEngine(ExternalEngine):
    """See `headwater.engines.base.Engine`."""

    def __init__(self, config: EngineConfig, placement: Placement = ALONE) -> None:
        super().__init__(config)
        self._placement = placement
        self._llm: Any = None
        self._results: dict[int, tuple[Any, asyncio.Task[None]]] = {}
        """TensorRT-LLM's handle of a sequence, and who reads it."""
        self._gathered = Gathered(self.deliver, lambda: self.num_generating)
        self._progress = PrefillProgress()
        self._stats: Mapping[str, Any] = {}
        self._paused_requests = 0
        self._draining_events: Draining | None = None
        self._owners: BlockOwners | None = None
        self._store: AttachedStore | None = None

    # ---- life

    async def open_engine(self, progress: ProgressSink) -> EngineInfo:
        installed = self._installed = await asyncio.to_thread(load_installed)
        self._handing_over = HandingOver(installed)
        texts, model = await asyncio.to_thread(texts_and_weights, self.config, "trtllm", progress)
        arguments = trtllm_arguments(self.config, model, store=self._placement.store is not None)
        if arguments.store and self._placement.store is not None:
            self._store = AttachedStore(installed, self._placement.store)
        async with pulse("TensorRT-LLM", progress):
            self._llm = await asyncio.to_thread(_start, installed, arguments)
            self._ends = list(texts.eos_token_ids)
            self._stats = await self._warm()
        self._adapters = arguments.adapters
        if self._store is not None:
            self._store.check()
        stored_by = installed.version if self._store is not None else ""
        info = engine_info(self.config, texts, self._llm, self._stats, list(arguments.adapters), stored_by)
        if self.config.enable_prefix_caching:
            self._follow_events(info.card)
        self.spawn(self._read_stats())
        self.spawn(self._watch_health())
        progress(Progress("ready", detail=info.card.name))
        return info

    async def close_engine(self) -> None:
        self.cancel(list(self._results))
        if self._draining_events is not None:
            await self._draining_events.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(llm.shutdown), _SHUTDOWN_TIMEOUT_S)
        if self._store is not None:
            self._store.close()

    async def _warm(self) -> Mapping[str, Any]:
        """One token, so that it is known to compute; then it says how many blocks it has. Raises `EngineFailed`."""
        token = self._ends[0] if self._ends else 0
        sampling = self._installed.SamplingParams(
            end_id=-1, pad_id=0, max_tokens=1, temperature=0.0, top_k=1, detokenize=False, add_special_tokens=False
        )
        try:
            async with asyncio.timeout(_WARM_TIMEOUT_S):
                await self._llm.generate_async([token], sampling_params=sampling, streaming=False)
                return await self._first_stats()
        except TimeoutError as error:
            raise EngineFailed(f"TensorRT-LLM computed nothing within {_WARM_TIMEOUT_S:.0f} s") from error
        except self._installed.RequestError as error:
            raise EngineFailed(f"TensorRT-LLM cannot compute: {error}") from error

    async def _first_stats(self) -> Mapping[str, Any]:
        while True:
            async for stats in self._llm.get_stats_async(_STATS_WAIT_S):
                if stats.get("kvCacheStats"):
                    return dict(stats)
            await asyncio.sleep(_STATS_PAUSE_S)

    def _follow_events(self, card: ModelCard) -> None:
        self._owners = BlockOwners(card.block_size, namespace(card.fingerprint, card.kv_layout))
        translator = FeedTranslator(card.fingerprint, card.kv_layout, card.block_size, self._owners)
        numbers = {adapter_number(folder): name for name, folder in self._adapters.items()}
        tell = self.tell if self._store is None else self.tell_device
        self._draining_events = Draining("TensorRT-LLM", translator, tell, self._drain_events, card.block_size, numbers)
        self.spawn(self._draining_events.run())

    async def _drain_events(self) -> list[Any]:
        found: list[Any] = []
        with contextlib.suppress(IndexError, asyncio.QueueEmpty):  # so it says that there are no more
            async for event in self._llm.get_kv_cache_events_async(0):
                found.append(event)  # noqa: PERF401 - what came before the end is kept
        return found

    # ---- work

    def send(self, stream: OpenStream, tokens: "array[int]") -> None:
        request, number = stream.request, stream.request.stream
        result, work = self._begin(request, tokens.tolist())
        if self._owners is not None:
            self._owners.begin(number, tokens, self.namespace_of(request), request.adapter)
        task = asyncio.get_running_loop().create_task(self._until_told(number, work))
        task.add_done_callback(lambda _: self._forget_owner(number))
        self._results[number] = (result, task)
        if self._draining_events is not None:
            self._draining_events.wake()

    def _begin(self, request: EngineRequest, prompt: list[int]) -> tuple[Any, Callable[[], Coroutine[Any, Any, None]]]:
        """TensorRT-LLM's handle, and what reads it. Raises `HeadwaterError`."""
        if request.export is not None:
            result = self._generate(request, prompt, self._handing_over.context_only(request))
            return result, partial(self._read_prefill, request.stream, result)
        if request.ticket:
            params = self._handing_over.generation_only(request.ticket)
            try:
                result = self._generate(request, prompt, params)
                return result, partial(self._read_with_ticket, request, prompt, result)
            except InvalidRequest as error:
                _log.warning("prefilling here: a ticket is not taken: %s", error)
        result = self._generate(request, prompt, None)
        return result, partial(self._read, request, result)

    def _generate(self, request: EngineRequest, prompt: list[int], disaggregated: Any) -> Any:
        """Raises `HeadwaterError` when it is refused."""
        installed = self._installed
        options = self._options(request)
        if disaggregated is not None:
            options["disaggregated_params"] = disaggregated
        sampling = trtllm_sampling(installed, request, self._ends, self.info.card.vocab_size)
        streaming = request.export is None
        try:
            result = self._llm.generate_async(prompt, sampling_params=sampling, streaming=streaming, **options)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"TensorRT-LLM: {error}") from error
        except RuntimeError as error:
            raise WorkerLost(f"TensorRT-LLM takes nothing any more: {error}") from error
        return result

    def cancel(self, streams: Sequence[int]) -> None:
        for number in streams:
            if (known := self._results.pop(number, None)) is not None:
                result, task = known
                task.cancel()
                result.abort()

    def load(self) -> LoadReport:
        num_open, num_blocks = len(self.open), self.info.kv_blocks
        waiting = self.num_beyond_slots(int(self._stats.get("numQueuedRequests", 0)))
        kv = self._stats.get("kvCacheStats") or {}
        return self.load_report(
            num_running=num_open - waiting,
            num_waiting=waiting,
            kv_blocks_free=min(num_blocks, int(kv.get("freeNumBlocks", 0))) if num_open else num_blocks,
        )

    def _options(self, request: EngineRequest) -> dict[str, Any]:
        """Beside the sampling parameters. Raises `InvalidRequest`."""
        installed = self._installed
        options: dict[str, Any] = {}
        if request.adapter is not None:
            folder = self._adapters.get(request.adapter)
            if folder is None:
                known = ", ".join(self._adapters) or "none is loaded"
                raise InvalidRequest(f"there is no adapter {request.adapter!r}: {known}", param="model")
            options["lora_request"] = installed.LoRARequest(request.adapter, adapter_number(folder), folder)
        if self._store is not None and request.adapter is None:
            salt: str | None = self._store.salt(self.naming(request))
        else:
            salt = salt_of(request.namespace, self.own_namespace(request.adapter))
        if salt is not None:
            if not installed.takes("cache_salt"):
                raise InvalidRequest(f"TensorRT-LLM {installed.version} takes no cache salt", param="cache_salt")
            options["cache_salt"] = salt
        if request.priority and installed.takes("priority"):
            options["priority"] = priority_of(request.priority)
        return options

    def price(self, rate: ComputeRate) -> None:
        if self._store is not None:
            self._store.price(rate)

    # ---- what comes back

    async def _until_told(self, number: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A sequence ends exactly once, also when reading it fails."""
        try:
            await work()
        except HeadwaterError as error:
            self._gathered.take(SequenceOutput.failed(number, error))
        except Exception as error:  # noqa: BLE001 - where a task ends
            _log.error("reading a sequence of TensorRT-LLM failed", exc_info=error)
            self._gathered.take(SequenceOutput.failed(number, WorkerLost(f"TensorRT-LLM failed: {error!r}")))
        finally:
            self._results.pop(number, None)

    def _forget_owner(self, number: int) -> None:
        if self._owners is not None:
            self._owners.end(number, asyncio.get_running_loop().time())

    async def _read(self, request: EngineRequest, result: Any, limit: asyncio.Timeout | None = None) -> None:
        """Until the sequence ends. `limit`: on the time until its first token."""
        reader = OutputReader(request.stream, request.sampling.logprobs, frozenset(self._ends))
        try:
            async for step in result:
                output = reader.read(step)
                if output is None:
                    continue
                if limit is not None:
                    limit.reschedule(None)
                    limit = None
                self._gathered.take(output)
                if output.finish_reason is not None:
                    return
        except self._installed.RequestError as error:
            raise WorkerLost(f"TensorRT-LLM: {error}") from error
        raise WorkerLost("TensorRT-LLM ended a sequence without saying why")

    async def _read_prefill(self, number: int, result: Any) -> None:
        """A prompt for another worker: its first token, and the ticket by which that one finds the KV."""
        try:
            await result
        except self._installed.RequestError as error:
            raise WorkerLost(f"TensorRT-LLM: {error}") from error
        self._gathered.take(self._handing_over.prefilled(number, result))

    async def _read_with_ticket(self, request: EngineRequest, prompt: list[int], result: Any) -> None:
        """KV that is gone, or does not come in time, is computed here."""
        try:
            async with asyncio.timeout(_TICKET_S) as limit:
                await self._read(request, result, limit)
            return
        except TimeoutError:
            _log.warning("prefilling here: no token came with a ticket within %.0f s", _TICKET_S)
        except WorkerLost as error:
            if limit.when() is None:  # some tokens are told already
                raise
            _log.warning("prefilling here: the KV of a ticket is gone: %s", error)
        result.abort()
        result = self._generate(request, prompt, None)
        self._results[request.stream] = (result, self._results[request.stream][1])
        await self._read(request, result)

    async def _read_stats(self) -> None:
        """One reader, for good: what it takes is gone."""
        while True:
            async for stats in self._llm.get_stats_async(_STATS_WAIT_S):
                self._on_iteration(stats)
            await asyncio.sleep(_STATS_PAUSE_S)

    def _on_iteration(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats
        batch = stats.get("inflightBatchingStats") or {}
        paused = int(batch.get("numPausedRequests", 0))
        self.totals.preemptions += max(0, paused - self._paused_requests)
        self._paused_requests = paused
        computed = int(batch.get("numCtxTokens", 0)), int(batch.get("numGenRequests", 0))
        if any(computed):
            latency_ms = float(stats.get("iterLatencyMS", 0.0))
            self.time_step(self._progress.timing(*computed, latency_ms, self.open))
        self.note_changed()

    async def _watch_health(self) -> None:
        """The executor may die without a word to those who wait for it."""
        check = getattr(self._llm, "_check_health", None)
        while check is not None:
            await asyncio.sleep(_HEALTH_S)
            if not check():
                self.fail(EngineFailed("TensorRT-LLM's executor has died"))
                return


def _start(installed: Installed, arguments: TrtllmArguments) -> Any:
    """In a thread: loading takes minutes."""
    with starting("TensorRT-LLM", "flags are arguments of tensorrt_llm.LLM, with dashes"):
        return installed.LLM(**arguments.llm)
