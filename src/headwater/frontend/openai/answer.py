"""The life of one generation request: submitted, answered, failed or abandoned, once.

`Answer` owns what is common: streams, time limit, disconnect, usage. `StreamAnswer` sends events as they come; its HTTP
status is decided by the first output or error, so an error before the first byte is a real status and one after it an
event. `WholeAnswer` gathers and answers at the end. Whatever ends a request first, its other streams are aborted at
once, and nothing is said twice.
"""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass

import msgspec

from headwater.clock import Clock
from headwater.errors import DeadlineExceeded, HeadwaterError, RequestError
from headwater.frontend.dispatch import Dispatcher
from headwater.frontend.http.base import Headers, Responder
from headwater.frontend.http.replies import JSON, reply_for
from headwater.frontend.openai.answers import PromptTokensDetails, Usage
from headwater.frontend.openai.generation import Extension, Generation
from headwater.frontend.openai.sinks import ChoiceSink, DirectSink
from headwater.frontend.postprocess.detokenize import ByteDetokenizer
from headwater.frontend.postprocess.sequence import Delta, SequenceText
from headwater.frontend.preprocess.tokenizer import unpack_ids
from headwater.router.decisions import DecisionRecord

KEEPALIVE_S = 5.0
"""Silence after which a stream says that it is alive (and commits to status 200)."""

STREAM_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every answer needs besides its request."""

    dispatcher: Dispatcher
    clock: Clock
    request_timeout_s: float = 0.0


class Answer(ABC):
    def __init__(
        self,
        generation: Generation,
        responder: Responder,
        around: Surroundings,
        since: float,
    ) -> None:
        self._clock = around.clock
        self._since = since
        self._first_output_at: float | None = None
        self._generation = generation
        self._responder = responder
        self._dispatcher = around.dispatcher
        self._timeout_s = around.request_timeout_s
        self._sinks = [self._make_sink(choice) for choice in range(generation.num_choices)]
        self._streams: list[int] = []
        self._open = generation.num_choices
        self._ended = False
        self._timeout: asyncio.TimerHandle | None = None
        self._decisions: list[DecisionRecord] = []
        """One per prompt, if the answer is to tell of them."""

    def begin(self) -> None:
        """Send the sequences to workers. Failures become the answer."""
        generation = self._generation
        arrival = self._clock.epoch()
        deadline = arrival + self._timeout_s if self._timeout_s else None
        per_prompt = generation.choices_per_prompt
        try:
            for number in range(len(generation.prompts)):
                requests = generation.engine_requests(number, arrival, deadline)
                sinks = self._sinks[number * per_prompt : (number + 1) * per_prompt]
                submitted = self._dispatcher.submit(generation.model.card, requests, sinks, generation.hints)
                self._streams += submitted
                if generation.nvext.extra_fields:
                    self._note_decision(submitted[0])
        except HeadwaterError as error:
            self.fail(error)
            return
        self._responder.on_disconnect(self._abandon)
        if self._timeout_s and not self._ended:
            self._timeout = asyncio.get_running_loop().call_later(self._timeout_s, self._time_out)

    @abstractmethod
    def deliver(self, choice: int, delta: Delta) -> None: ...

    @abstractmethod
    def write(self, data: bytes) -> None: ...

    @abstractmethod
    def _answer_failure(self, error: HeadwaterError) -> None: ...

    def _make_sink(self, choice: int) -> ChoiceSink:
        return ChoiceSink(self, choice, self._generation.sequence_text(choice))

    def stop(self, choice: int) -> None:
        self._dispatcher.abort(self._streams[choice : choice + 1])

    def fail(self, error: HeadwaterError) -> None:
        if not self._ended:
            self._end()
            if isinstance(error, RequestError) and error.param == "prompt":
                error.param = self._generation.prompt_param  # workers know it by one name
            self._answer_failure(error)

    def _abandon(self) -> None:
        """The client is gone."""
        if not self._ended:
            self._end()

    def _time_out(self) -> None:
        self.fail(DeadlineExceeded(f"the request took longer than the limit of {self._timeout_s:g} s"))

    def _end(self) -> None:
        """Nothing more is generated for this request."""
        self._ended = True
        if self._timeout is not None:
            self._timeout.cancel()
        if self._open:
            self._dispatcher.abort(self._streams)
        # Answer and sinks hold each other; left so, they and the prompt would stay until the garbage collector comes.
        self._sinks.clear()

    def _note(self, delta: Delta) -> bool:
        """Keep account of a delta; whether it is the last one of the request."""
        if self._first_output_at is None:
            self._first_output_at = self._clock.now()
        if delta.finish_reason is None:
            return False
        self._open -= 1
        return self._open == 0

    def usage(self) -> Usage:
        """So far. A prompt counts once, however many choices it has."""
        prompt = self._generation.num_prompt_tokens
        completion = sum(sink.text.num_tokens for sink in self._sinks)
        cached = sum(sink.cached_tokens for sink in self._sinks[:: self._generation.choices_per_prompt])
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def _extension(self, *, last: bool) -> Extension | None:
        """What `nvext.extra_fields` asked for."""
        asked = self._generation.nvext.extra_fields
        if not asked:
            return None
        extension: Extension = {}
        if "worker_id" in asked:
            worker_id = self._decisions[0].worker_id if self._decisions else None
            extension["worker_id"] = {"prefill_worker_id": worker_id, "decode_worker_id": worker_id}
        if "plan" in asked and last:
            extension["plan"] = [decision.describe() for decision in self._decisions]
        if "warnings" in asked and last:
            extension["warnings"] = self._generation.warnings
        if "timing" in asked and last:
            extension["timing"] = self._timing()
        return extension or None

    def _note_decision(self, stream: int) -> None:
        decision = self._dispatcher.decision_of(stream)
        if decision is not None:
            self._decisions.append(decision)

    def _timing(self) -> dict[str, float]:
        total_s = self._clock.now() - self._since
        usage = self.usage()
        timing = {"request_received_ms": (self._clock.epoch() - total_s) * 1e3, "total_time_ms": total_s * 1e3}
        if self._first_output_at is not None:
            timing["ttft_ms"] = (self._first_output_at - self._since) * 1e3
        timing["kv_hit_rate"] = usage.prompt_tokens_details.cached_tokens / max(1, usage.prompt_tokens)
        return timing


class StreamAnswer(Answer):
    """Server-sent events."""

    def __init__(
        self,
        generation: Generation,
        responder: Responder,
        around: Surroundings,
        since: float,
    ) -> None:
        super().__init__(generation, responder, around, since)
        self._started = False
        self._opened = [False] * generation.num_choices
        self._num_tokens_seen = 0
        """As of the last look for silence."""
        self._keepalive: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        super().begin()
        if not self._ended:
            self._keepalive = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._keep_alive)

    def _make_sink(self, choice: int) -> ChoiceSink:
        generation = self._generation
        frame = generation.format.frame(choice)
        table = generation.model.table
        if frame is None or table is None or generation.stops is not None or not generation.skip_special_tokens:
            return super()._make_sink(choice)
        detokenizer = ByteDetokenizer(table.visible)
        text = SequenceText(generation.text, detokenizer, None)
        return DirectSink(self, choice, text, detokenizer, table.escaped, frame)

    def write(self, data: bytes) -> None:
        if not self._started:
            self._started = True
            self._responder.start(200, STREAM_HEADERS)
            data = self._annotations() + data
        self._responder.write(data)

    def deliver(self, choice: int, delta: Delta) -> None:
        if self._ended:
            return
        last = self._note(delta)
        generation = self._generation
        usage = self.usage() if generation.stream_options.continuous_usage_stats else None
        data = generation.format.event(choice, delta, usage, self._extension(last=last))
        if not self._opened[choice]:
            self._opened[choice] = True
            data = generation.format.opening(choice) + data
        if not last:
            if data:
                self.write(data)
            return
        if generation.stream_options.include_usage:
            data += generation.format.usage_event(self.usage(), self._extension(last=True))
        self.write(data + DONE)
        self._end()
        self._responder.finish()

    def _end(self) -> None:
        if self._keepalive is not None:
            self._keepalive.cancel()
        super()._end()

    def _answer_failure(self, error: HeadwaterError) -> None:
        reply = reply_for(error)
        if not self._started:
            reply.send_to(self._responder)
            return
        self._responder.write(b"data: " + reply.body + b"\n\n" + DONE)
        self._responder.finish()

    def _keep_alive(self) -> None:
        """A comment that clients skip, so that proxies do not take a long silence for a dead connection."""
        num_tokens = sum(sink.text.num_tokens for sink in self._sinks)
        if num_tokens == self._num_tokens_seen:
            self.write(KEEPALIVE)
        self._num_tokens_seen = num_tokens
        self._keepalive = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._keep_alive)

    def _annotations(self) -> bytes:
        """Dynamo's way to show what became of the prompt: an event line and a comment with JSON."""
        generation = self._generation
        events: list[bytes] = []
        for name in generation.nvext.annotations:
            if name == "formatted_prompt" and generation.formatted_prompt is not None:
                events.append(_annotation(name, generation.formatted_prompt))
            elif name == "token_ids":
                events.append(_annotation(name, unpack_ids(generation.prompts[0].ids)))
        return b"".join(events)


def _annotation(name: str, value: object) -> bytes:
    return b"event: " + name.encode() + b"\n: " + msgspec.json.encode(value) + b"\n\n"


class WholeAnswer(Answer):
    """One JSON document at the end."""

    def __init__(
        self,
        generation: Generation,
        responder: Responder,
        around: Surroundings,
        since: float,
    ) -> None:
        super().__init__(generation, responder, around, since)
        self._texts: list[list[str]] = [[] for _ in range(generation.num_choices)]
        self._choices = [Delta("", []) for _ in range(generation.num_choices)]

    def write(self, data: bytes) -> None:
        raise AssertionError("a whole answer is not streamed")

    def deliver(self, choice: int, delta: Delta) -> None:
        if self._ended:
            return
        last = self._note(delta)
        whole = self._choices[choice]
        self._texts[choice].append(delta.text)
        whole.token_ids += delta.token_ids
        whole.logged += delta.logged
        if delta.finish_reason is not None:
            whole.text = "".join(self._texts[choice])
            whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
        if last:
            body = self._generation.format.whole(self._choices, self.usage(), self._extension(last=True))
            self._end()
            self._responder.send(200, (JSON,), body)

    def _answer_failure(self, error: HeadwaterError) -> None:
        reply_for(error).send_to(self._responder)
