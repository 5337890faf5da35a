"""A request in SGLang's words: the arguments of `/generate` and of `Engine.async_generate`, which are the same.

Every field of ours has a place or is refused by name. SGLang refuses lengths that do not fit instead of stopping
there, so they are cut to the context here. The salt goes out under two names: `cache_salt` is told of in KV events,
`extra_key` keeps prefixes apart in releases that ignore the former.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headwater.engines.limits import check_resumable, num_resumed
from headwater.engines.sglang_wire.settings import SglangSettings
from headwater.errors import HandoffFailed, InvalidRequest, Unavailable
from headwater.protocol.request import EngineRequest, SamplingParams, StructuredSpec
from headwater.types import Role

_MAX_SEED = 2**63 - 1
_ALL = -1
"""SGLang's `top_k` for no limit."""
_MAX_REPETITION_PENALTY = 2.0
_REGEX_MARKS = frozenset(r".^$*+?{}[]\|()/-")


def generate_arguments(
    request: EngineRequest, tokens: Sequence[int], salt: str | None, settings: SglangSettings
) -> dict[str, Any]:
    """`tokens`: prompt and resumed ones. Raises `InvalidRequest`."""
    arguments: dict[str, Any] = {
        "input_ids": list(tokens),
        "sampling_params": _sampling(request, len(tokens), settings),
        "stream": True,
    }
    if request.sampling.logprobs is not None:
        arguments |= {
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.sampling.logprobs,
        }
    if request.adapter is not None:
        arguments["lora_path"] = request.adapter
    if salt is not None:
        arguments |= {"cache_salt": salt, "extra_key": salt}
    if settings.role is not None:
        arguments |= _pairing(request, settings.role)
    if request.priority and settings.enable_priority_scheduling:
        arguments["priority"] = -request.priority if settings.schedule_low_priority_values_first else request.priority
    return arguments


def _sampling(request: EngineRequest, num_tokens: int, settings: SglangSettings) -> dict[str, Any]:
    params = request.sampling
    resumed = num_resumed(request)
    _check_ranges(params)
    most = params.max_tokens - resumed
    if settings.max_model_len is not None:
        most = max(1, min(most, settings.max_model_len - num_tokens))
    words: dict[str, Any] = {
        "max_new_tokens": most,
        "min_new_tokens": min(most, max(0, params.min_tokens - resumed)),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or _ALL,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": params.goes_past_end,
    }
    if params.stop_token_ids:
        words["stop_token_ids"] = list(params.stop_token_ids)
    if params.logit_bias:
        words["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.temperature and (settings.enable_deterministic_inference or not params.seed_drawn):
        # A deterministic SGLang draws by seed and position, as we do, and without a seed by the same one for all.
        words["sampling_seed"] = params.seed & _MAX_SEED
    if params.structured is not None:
        check_resumable(params, resumed, "SGLang")
        words |= _structured(params.structured)
    return words


def _pairing(request: EngineRequest, role: Role) -> Mapping[str, str | int]:
    """Both servers of a pair are sent the same. Raises what says that only half of it is there."""
    pairing = request.pairing
    if pairing is None and role == "prefill":
        raise Unavailable("this SGLang server only prefills, for others that decode, and none is there")
    if pairing is None:
        raise HandoffFailed("this SGLang server only decodes, and no other one was named to prefill")
    return {"bootstrap_host": pairing.host, "bootstrap_port": pairing.port, "bootstrap_room": pairing.room}


def _check_ranges(params: SamplingParams) -> None:
    if not 0 < params.repetition_penalty <= _MAX_REPETITION_PENALTY:
        raise InvalidRequest(
            f"repetition_penalty is {params.repetition_penalty}: SGLang takes more than 0, and at most 2",
            param="repetition_penalty",
        )


def _structured(spec: StructuredSpec) -> Mapping[str, str]:
    match spec.kind:
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "json_schema":
            return {"json_schema": spec.spec}
        case "regex":
            return {"regex": spec.spec}
        case "choice":
            choices = msgspec.json.decode(spec.spec, type=list[str])
            return {"regex": "|".join(f"({_literal(choice)})" for choice in choices)}
        case _:
            return {"ebnf": spec.spec}


def _literal(text: str) -> str:
    """As every grammar back-end of SGLang reads it: only marks are escaped."""
    return "".join(f"\\{letter}" if letter in _REGEX_MARKS else letter for letter in text)
