"""The scheduler's half of the vLLM connector: what is loaded before a request is computed, what is saved after a step.

vLLM's loop never waits for the store: a question that is not answered at once is asked for again with the next step
(`None` of the interface), for a bounded time, after which the request is computed. A store that did not answer is left
alone for a while. Each request is given one load, and one more after each preemption: a load that failed is not tried
again.
"""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from headwater.errors import HeadwaterError
from headwater.kv.connectors.chains import RequestChain, Save, socket_path
from headwater.kv.connectors.vllm_layout import Layout
from headwater.kv.connectors.vllm_naming import naming_in
from headwater.kv.connectors.vllm_parts import Parts
from headwater.kv.node.agent import StoreAgent
from headwater.kv.node.store import Piece
from headwater.kv.pricing import LoadPlan, TierRun

_log = logging.getLogger(__name__)

_AT_ONCE_S = 0.002
"""What the store's process takes when it need not ask anybody."""
_ANSWER_S = 0.1
_ASK_PART = 0.02
_MAX_ASK_S = 0.25
"""Others are asked for a small part of what computing takes."""
_REST_S = 5.0
_KEPT_S = 0.5
"""An answer, for a request that waits for room."""
_PATIENCE = 4.0
_MIN_PATIENCE_S = 0.5
"""A load may take so many times what was predicted."""
_MAX_LOADING_BYTES = 64 << 30
"""Of all requests: they hold blocks of the device while they load."""
_MIN_PREFILL_TOKENS = 32
"""Steps with fewer are mostly about something else."""
_MEMORY = 0.2
"""What a new step counts for in the speed learned."""


@dataclass(frozen=True)
class Load:
    """Blocks to be brought in for one request."""

    request_id: str
    chain: Piece
    block_ids: list[int]
    timeout_s: float


@dataclass
class StepTransfers:
    """What the workers do around one forward pass. Chains are those of the first parts."""

    loads: list[Load] = field(default_factory=list[Load])
    saves: list[Save] = field(default_factory=list[Save])
    number: int = 0
    """Of a step that is timed."""


@dataclass(slots=True)
class _Question:
    """To the store, about a request's blocks from `first` on."""

    first: int
    chain: Piece
    asked: "Future[list[TierRun]]"
    until: float
    plan: LoadPlan | None = None


@dataclass(slots=True)
class _Request:
    request: Any
    chain: RequestChain
    question: _Question | None = None
    preemptions_loaded: int = -1
    """How often it had been preempted when it was last given a load."""
    num_saved: int = -1
    """Leading blocks that are in the store; -1: not looked up yet."""


class SchedulerHalf:
    """See the module docstring. Called from vLLM's scheduler alone."""

    def __init__(
        self,
        layout: Layout,
        parts: Parts,
        socket: str | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        named_by_worker: bool = False,
    ) -> None:
        """`parts`: those of rank 0. `named_by_worker`: whether requests say how their blocks are named. One that does
        not is left alone then."""
        self._layout, self._parts, self._clock = layout, parts, clock
        self._named_by_worker = named_by_worker
        self._agent = StoreAgent(socket_path(socket), "vllm-scheduler")
        self._requests: dict[str, _Request] = {}
        self._step = StepTransfers()
        self._loading: dict[str, int] = {}
        """Bytes, by request."""
        self._rest_until = 0.0
        self._era = ""
        self._speed = PrefillSpeed(clock)

    def close(self) -> None:
        self._agent.close()

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens are worth loading; None: to be asked again. At least one token stays to be computed."""
        state = self._state(request)
        size = self._layout.block_tokens
        if state is None or num_computed_tokens % size or request.num_preemptions <= state.preemptions_loaded:
            return 0, False
        first, end = num_computed_tokens // size, (request.num_tokens - 1) // size
        if first >= end or not self._is_there():
            return 0, False
        plan = self._answer(state, first, end)
        if plan is None:
            return None, False
        return plan.num_blocks * size, plan.num_blocks > 0

    def load(self, request: Any, block_ids: list[int], num_tokens: int) -> None:
        """vLLM has given blocks for what was matched."""
        state = self._requests[request.request_id]
        question, count = state.question, num_tokens // self._layout.block_tokens
        assert question is not None, "blocks for a load that was not offered"
        assert question.plan is not None
        state.question, state.preemptions_loaded = None, request.num_preemptions
        chain = question.chain.part(0, count)
        places = block_ids[question.first : question.first + count]
        timeout_s = max(_MIN_PATIENCE_S, _PATIENCE * question.plan.load_ms / 1e3)
        self._loading[request.request_id] = count * self._layout.block_bytes
        self._step.loads.append(Load(request.request_id, chain, places, timeout_s))

    def step_ended(self, number: int, loaded: Iterable[str]) -> None:
        """The timed step of that number has been computed; these requests wait for nothing any more."""
        self._speed.ended(number)
        for request_id in loaded:
            self._loading.pop(request_id, None)

    def step(self, output: Any) -> StepTransfers:
        """Everything for the step that vLLM has just planned."""
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._step.number = self._speed.planned(output.total_num_scheduled_tokens)
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, count in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None:
                self._save(request_id, state, computed[request_id], count, output.kv_connector_block_state)
        step, self._step = self._step, StepTransfers()
        return step

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def begin_anew(self) -> None:
        self._era = f"{uuid4().hex}/"
        self._requests.clear()

    # Inside

    def _state(self, request: Any) -> _Request | None:
        """None: its tokens do not say all about its KV."""
        state = self._requests.get(request.request_id)
        if state is None and _is_plain(request) and (chain := self._chain(request)) is not None:
            state = self._requests[request.request_id] = _Request(request, chain)
        return state

    def _chain(self, request: Any) -> RequestChain | None:
        size = self._layout.block_tokens
        if self._named_by_worker:
            naming = naming_in(request.kv_transfer_params)
            family = self._parts.family("")
            return RequestChain(naming.family(family), naming.key(self._era), size) if naming is not None else None
        salt, lora = str(request.cache_salt or ""), request.lora_request
        adapter = f"{lora.lora_name}@{lora.lora_path}" if lora is not None else ""
        return RequestChain(self._parts.family(salt), self._parts.key(adapter, salt, self._era), size)

    def _is_there(self) -> bool:
        return not self._agent.client.problem and self._clock() >= self._rest_until

    def _answer(self, state: _Request, first: int, end: int) -> LoadPlan | None:
        now = self._clock()
        question = state.question
        if question is None or question.first != first or (question.plan is not None and now > question.until):
            question = state.question = self._ask(state, first, end, now)
        if question.plan is not None:
            return question.plan
        try:
            runs = question.asked.result(0 if question.asked.done() else _AT_ONCE_S)
        except FutureTimeoutError:
            if now < question.until:
                return None
            question.asked.cancel()
            self._rest_until = now + _REST_S
            _log.warning("the KV store did not answer within %.1f s; computing for a while", _ANSWER_S + _MAX_ASK_S)
            runs = []
        except HeadwaterError as error:
            _log.warning("the KV store does not answer, blocks are computed: %s", error)
            runs = []
        question.until = now + _KEPT_S
        question.plan = self._plan(state.request, question, runs)
        return question.plan

    def _ask(self, state: _Request, first: int, end: int, now: float) -> _Question:
        chain = state.chain.upto(state.request.all_token_ids, end).part(first, end)
        compute_s = self._speed.prefill_ms((end - first) * self._layout.block_tokens, 0) / 1e3
        ask_s = min(_MAX_ASK_S, _ASK_PART * compute_s)
        asked = self._agent.ask(chain, ask_s=ask_s, num_parts=len(self._parts.held))
        return _Question(first, chain, asked, now + _ANSWER_S + ask_s)

    def _plan(self, request: Any, question: _Question, runs: list[TierRun]) -> LoadPlan:
        plan = self._agent.client.plan(
            question.chain,
            runs,
            self._speed.prefill_ms,
            num_tokens=request.num_tokens,
            cached_tokens=question.first * self._layout.block_tokens,
            block_tokens=self._layout.block_tokens,
        )
        room = max(0, _MAX_LOADING_BYTES - sum(self._loading.values())) // self._layout.block_bytes
        return plan._replace(num_blocks=min(plan.num_blocks, room))

    def _save(self, request_id: str, state: _Request, computed: int, scheduled: int, blocks: Any) -> None:
        """What the step makes full. Tokens that are only drafts, or not sampled yet, are not known here."""
        size, tokens = self._layout.block_tokens, state.request.all_token_ids
        full = min(computed + scheduled, len(tokens)) // size
        if full <= state.num_saved or not full:
            return
        chain = state.chain.upto(tokens, full)
        if state.num_saved < 0:
            # vLLM had these blocks; the store may not, and then nothing behind them would be found.
            before = chain.part(0, min(full, computed // size))
            state.num_saved = self._agent.num_in_host(before.ids)
        places = blocks.get_block_ids(request_id)
        if places is not None and full > state.num_saved and self._is_there():
            self._step.saves.append(Save(chain.part(state.num_saved, full), list(places[0][state.num_saved : full])))
        state.num_saved = full


class PrefillSpeed:
    """What computing a token costs, learned from steps that are mostly prompt. vLLM may plan one step while another is
    computed."""

    def __init__(self, clock: Callable[[], float], token_ms: float = 0.25) -> None:
        self._clock, self._token_ms = clock, token_ms
        self._under_way: dict[int, tuple[float, int]] = {}
        self._last_number = 0
        self._last_end = 0.0

    def planned(self, num_tokens: int) -> int:
        """Number of the step; 0: it says nothing about prompts."""
        if num_tokens < _MIN_PREFILL_TOKENS:
            return 0
        self._last_number += 1
        self._under_way[self._last_number] = (self._clock(), num_tokens)
        return self._last_number

    def ended(self, number: int) -> None:
        found = self._under_way.pop(number, None)
        if found is None:
            return
        now, (planned, num_tokens) = self._clock(), found
        token_ms = 1e3 * (now - max(planned, self._last_end)) / num_tokens
        self._token_ms += _MEMORY * (token_ms - self._token_ms)
        self._last_end = now
        # Of steps whose end nobody tells, such as those of an engine that was interrupted.
        for old in [old for old in self._under_way if old < number]:
            del self._under_way[old]

    def prefill_ms(self, num_tokens: int, cached_tokens: int) -> float:
        """Attention to what comes before is left out: long prompts are worth more than this says."""
        return num_tokens * self._token_ms


def _is_plain(request: Any) -> bool:
    return request.prompt_embeds is None and not request.mm_features and request.pooling_params is None
