"""`LLM`: offline generation with vLLM's call signatures, on any engine of ours.

Prompts and parameters are put as a request of our OpenAI layer, so that they are checked, templated and turned into
text exactly as for a client of the server.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from headwater.clock import RealClock
from headwater.compat.vllm.outputs import CompletionOutput, RequestOutput, logged_position
from headwater.compat.vllm.params import SamplingParams
from headwater.compat.vllm.runner import EngineThread
from headwater.config.schema import EngineConfig
from headwater.engines.base import Progress
from headwater.errors import ConfigError, HeadwaterError, InvalidRequest, WorkerError
from headwater.frontend.openai.chat import prepare_chat
from headwater.frontend.openai.completions import prepare_completion
from headwater.frontend.openai.generation import Generation
from headwater.frontend.openai.model import RelayedModel, ServedModel, build_model
from headwater.frontend.openai.preparation import Asker
from headwater.frontend.postprocess.sequence import SequenceText
from headwater.frontend.preprocess.tokenizer import unpack_ids
from headwater.frontend.remote_errors import error_from
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest, SequenceOutput

Prompt = str | Mapping[str, Any] | Sequence[int]
"""A text, token ids, or vLLM's `{"prompt": ...}` and `{"prompt_token_ids": [...]}`."""

_RENAMED = {"num_gpu_blocks_override": "num_kv_blocks", "kv_cache_memory_bytes": "kv_cache_memory"}
_NO_MEANING_HERE = frozenset(
    (
        "trust_remote_code",
        "enforce_eager",
        "gpu_memory_utilization",
        "swap_space",
        "seed",
        "disable_log_stats",
        "tokenizer_mode",
        "hf_token",
    )
)
"""Accepted for engines that have no use for them."""


class LLM:
    """A model, ready to generate. Close it, or use it as a context manager, to let go of its memory early."""

    relays = False

    def __init__(
        self, model: str | None = None, *, engine: str = "native", tokenizer: str | None = None, **options: Any
    ) -> None:
        """`options`: vLLM's arguments. With `engine="vllm"` all of them go to vLLM, else those that we have."""
        self._clock = RealClock()
        self._thread = EngineThread(_config(model, engine, tokenizer, options), _silent)
        try:
            self._model = _served(self._thread)
        except BaseException:
            self._thread.close()
            raise
        self._requests = 0

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"LLM.{name} is not offered here: generate and chat are")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._thread.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """In the order of the prompts. Raises `RequestError` before anything is computed, if any cannot be served."""
        listed: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        params = _each(sampling_params, len(listed))
        bodies = [
            {"prompt": _completion_prompt(prompt), **_fields(one, chat=False), **_priority(priority, number)}
            for number, (prompt, one) in enumerate(zip(listed, params, strict=True))
        ]
        return self._run([prepare_completion(self._body(body), self, self._asker(), strict=True) for body in bodies])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One conversation, or several."""
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        common = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **({"tools": list(tools)} if tools else {}),
            **({"chat_template_kwargs": dict(chat_template_kwargs)} if chat_template_kwargs else {}),
        }
        bodies = [
            {"messages": list(conversation), **common, **_fields(params, chat=True)}
            for conversation, params in zip(conversations, _each(sampling_params, len(conversations)), strict=True)
        ]
        return self._run([prepare_chat(self._body(body), self, self._asker(), strict=True) for body in bodies])

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own."""
        known = SamplingParams.__dataclass_fields__
        return SamplingParams(**{name: v for name, v in self._model.card.default_sampling.items() if name in known})  # type: ignore[arg-type]

    # ModelLookup

    def get(self, name: str) -> ServedModel:
        return self._model

    def cards(self) -> list[ModelCard]:
        return [self._model.card]

    # inner life

    def _body(self, fields: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode({"model": self._model.card.name, **fields})

    def _asker(self) -> Asker:
        self._requests += 1
        return Asker(str(self._requests - 1), self._clock)

    def _run(self, generations: Sequence[Generation]) -> list[RequestOutput]:
        answers = [_Answer(generation) for generation in generations]
        self._thread.run([pair for answer in answers for pair in answer.requests(self._clock.epoch())])
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return [answer.output for answer in answers]


class _Answer:
    """What one prompt brings. Fed on the engine's thread."""

    def __init__(self, generation: Generation) -> None:
        self.error: HeadwaterError | None = None
        self._generation = generation
        prompt = generation.prompts[0]
        count = generation.num_choices
        self.output = RequestOutput(
            generation.request_id,
            generation.formatted_prompt,
            unpack_ids(prompt.ids),
            [CompletionOutput(index) for index in range(count)],
        )
        self._texts: list[SequenceText] = [generation.sequence_text(index) for index in range(count)]
        self._logged = generation.sampling[0].logprobs is not None

    def requests(self, arrival: float) -> "list[tuple[EngineRequest, Any]]":
        requests = self._generation.engine_requests(0, arrival, None)
        return [(request, self._taker(index)) for index, request in enumerate(requests)]

    def _taker(self, index: int) -> Any:
        return lambda output: self._take(index, output)

    def _take(self, index: int, output: SequenceOutput) -> bool:
        own = self.output.outputs[index]
        if output.finish_reason in ("error", "abort"):
            self.error = self.error or (error_from(output.error) if output.error else WorkerError("not completed"))
            return False
        if output.num_cached_tokens is not None and self.output.num_cached_tokens is None:
            self.output.num_cached_tokens = output.num_cached_tokens
        text = self._texts[index]
        delta = text.push(output)
        own.text += delta.text
        own.token_ids += delta.token_ids
        if self._logged:
            own.logprobs = own.logprobs or []
            own.logprobs += [logged_position(token, self._generation.model) for token in delta.logged]
            own.cumulative_logprob = (own.cumulative_logprob or 0.0) + sum(t.logprobs.logprob for t in delta.logged)
        if delta.finish_reason is not None:
            own.finish_reason, own.stop_reason = delta.finish_reason, delta.stop_reason
        self.output.finished = all(one.finished() for one in self.output.outputs)
        return text.stopped and output.finish_reason is None


def _config(model: str | None, engine: str, tokenizer: str | None, options: Mapping[str, Any]) -> EngineConfig:
    known = set(EngineConfig.__struct_fields__)
    ours: dict[str, Any] = {"engine": engine, "model": model, "tokenizer": tokenizer}
    words: list[str] = []
    for name, value in options.items():
        own = _RENAMED.get(name, name)
        if engine == "vllm":
            words += _words(name, value)
        elif own in known:
            ours[own] = (value,) if own == "served_model_name" and isinstance(value, str) else value
        elif name not in _NO_MEANING_HERE:
            raise ConfigError(
                f"LLM: engine {engine!r} has no option {name!r}", hint='engine="vllm" takes all of vLLM\'s'
            )
    try:
        return msgspec.convert({**ours, "engine_args": tuple(words)}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"LLM: {error}") from error


def _words(name: str, value: Any) -> list[str]:
    """A keyword argument as vLLM's flag."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if value is None:
        return []
    return [flag, value if isinstance(value, str) else msgspec.json.encode(value).decode()]


def _served(thread: EngineThread) -> ServedModel:
    info = thread.info
    files = {artifact.name: info.artifacts[artifact.digest] for artifact in info.card.artifacts}
    contents = {name: file if isinstance(file, bytes) else file.read_bytes() for name, file in files.items()}
    model = build_model(info.card, contents)
    if isinstance(model, RelayedModel):
        raise ConfigError("LLM: the model is relayed to a server, which this interface cannot use")
    return model


def _is_one(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts is of type {type(prompts).__name__}, expected a text, token ids or a list of such",
            param="prompts",
        )
    return bool(prompts) and isinstance(prompts[0], int)


def _completion_prompt(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        found = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if found is None or prompt.get("multi_modal_data"):
            raise InvalidRequest("a prompt is a text or token ids; media are not taken here", param="prompt")
        return found if isinstance(found, str) else list(found)
    return list(prompt)


def _each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling parameters for {count} prompts", param="sampling_params")
    return list(params)


def _fields(params: SamplingParams | None, *, chat: bool) -> dict[str, Any]:
    return {} if params is None else params.body(chat=chat)


def _priority(priority: Sequence[int] | None, number: int) -> dict[str, int]:
    return {} if priority is None else {"priority": priority[number]}


def _silent(_: Progress) -> None:
    return
