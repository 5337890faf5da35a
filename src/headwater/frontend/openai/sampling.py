"""From request fields to `SamplingParams`: defaults of the model, ranges that depend on it, structured output."""

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from headwater.errors import InvalidRequest
from headwater.frontend.openai.parse import short_json
from headwater.frontend.openai.schema import GenerationFields, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from headwater.frontend.postprocess.sequence import TextOptions
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import SamplingParams, StructuredKind, StructuredSpec

_SEED_MASK = 2**63 - 1
_MAX_SPEC_CHARS = 262_144
_MAX_BIAS = 100
_FORMATS = ("text", "json_object", "json_schema")
_TEXTS = {"regex": "regular expression", "grammar": "grammar"}
_SCHEMA_PARAM = "response_format.json_schema.schema"


def sampling_params(
    fields: GenerationFields,
    card: ModelCard,
    max_tokens: int,
    logprobs: int | None,
    structured: StructuredSpec | None,
) -> SamplingParams:
    """Parameters of the first choice; others differ by their seed. Raises `InvalidRequest`."""
    defaults = card.default_sampling
    min_tokens = fields.min_tokens
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens:,}, more than the {max_tokens:,} tokens that may be generated",
            param="min_tokens",
        )
    greedy = fields.nvext is not None and fields.nvext.greed_sampling
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=0.0 if greedy else _or_default(fields.temperature, defaults, "temperature", 1.0),
        top_p=_or_default(fields.top_p, defaults, "top_p", 1.0),
        top_k=_top_k(fields, card),
        min_p=_or_default(fields.min_p, defaults, "min_p", 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_or_default(fields.repetition_penalty, defaults, "repetition_penalty", 1.0),
        logit_bias=_logit_bias(fields.logit_bias, card.vocab_size) if fields.logit_bias else {},
        seed=random.getrandbits(63) if fields.seed is None else fields.seed & _SEED_MASK,
        logprobs=logprobs,
        stop_token_ids=_stop_token_ids(fields.stop_token_ids, card.vocab_size) if fields.stop_token_ids else [],
        ignore_eos=fields.ignore_eos,
        structured=structured,
        seed_drawn=fields.seed is None,
    )


def with_choice_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """The same parameters for another choice of the same prompt."""
    if choice == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + choice) & _SEED_MASK)


def text_options(fields: GenerationFields) -> TextOptions:
    return TextOptions(
        min_tokens=fields.min_tokens,
        include_stop=fields.include_stop_str_in_output,
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
    )


def stop_strings(fields: GenerationFields) -> list[str]:
    stop = fields.stop
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else stop


def scheduling_priority(fields: GenerationFields) -> int:
    """Higher is served first. vLLM's field counts the other way round; `nvext` wins."""
    hints = fields.nvext.agent_hints if fields.nvext is not None else None
    if hints is not None and hints.strict_priority is not None:
        return hints.strict_priority
    if hints is not None and hints.priority is not None:
        return hints.priority
    return -fields.priority if fields.priority else 0


def cache_salt(fields: GenerationFields) -> str:
    if fields.nvext is not None and fields.nvext.cache_salt is not None:
        return fields.nvext.cache_salt
    return fields.cache_salt or ""


def structured_spec(fields: GenerationFields) -> StructuredSpec | None:
    """The one constraint on the output that the request names. Raises `InvalidRequest`."""
    if fields.response_format is None and fields.structured_outputs is None and not _any_guided(fields):
        return None
    found: list[StructuredSpec] = []
    if fields.response_format is not None:
        _add(found, _from_response_format(fields.response_format))
    guided: list[tuple[str, StructuredKind, Any]] = [
        ("guided_json", "json_schema", fields.guided_json),
        ("guided_regex", "regex", fields.guided_regex),
        ("guided_choice", "choice", fields.guided_choice),
        ("guided_grammar", "grammar", fields.guided_grammar),
    ]
    if fields.structured_outputs is not None:
        asked = fields.structured_outputs
        _check_offered(asked)
        guided += [
            ("structured_outputs.json", "json_schema", asked.json),
            ("structured_outputs.regex", "regex", asked.regex),
            ("structured_outputs.choice", "choice", asked.choice),
            ("structured_outputs.grammar", "grammar", asked.grammar),
            ("structured_outputs.json_object", "json_object", asked.json_object or None),
        ]
    for param, kind, value in guided:
        if value is not None:
            _add(found, StructuredSpec(kind, _spec_text(param, kind, value), param))
    if len(found) > 1:
        names = " and ".join(spec.param for spec in found)
        raise InvalidRequest(f"{names} are given, expected one constraint on the output", param=found[0].param)
    return found[0] if found else None


_OFFERED = ("json", "regex", "choice", "grammar", "json_object")
_NOT_OFFERED = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def _check_offered(asked: StructuredOutputs) -> None:
    """Who asks for a constraint and has misspelled it must not get an answer without one."""
    for name in _NOT_OFFERED:
        if getattr(asked, name) not in (None, False):
            param = f"structured_outputs.{name}"
            raise InvalidRequest(f"{param} is not supported: leave it out", param=param)
    if all(getattr(asked, name) is None for name in _OFFERED):
        raise InvalidRequest(
            f"structured_outputs names no constraint, expected one of {', '.join(_OFFERED)}", param="structured_outputs"
        )


def _any_guided(fields: GenerationFields) -> bool:
    return (
        fields.guided_json is not None
        or fields.guided_regex is not None
        or fields.guided_choice is not None
        or fields.guided_grammar is not None
    )


def _add(found: list[StructuredSpec], spec: StructuredSpec | None) -> None:
    if spec is None:
        return
    if len(spec.spec) > _MAX_SPEC_CHARS:
        raise InvalidRequest(
            f"{spec.param} has {len(spec.spec):,} characters, at most {_MAX_SPEC_CHARS:,} fit", param=spec.param
        )
    found.append(spec)


def _from_response_format(asked: ResponseFormat) -> StructuredSpec | None:
    if asked.type not in _FORMATS:
        raise InvalidRequest(
            f"response_format.type is {short_json(asked.type)}, expected one of {', '.join(_FORMATS)}",
            param="response_format.type",
        )
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredSpec("json_object")
    return StructuredSpec("json_schema", _schema_text(asked.json_schema), _SCHEMA_PARAM)


def _schema_text(asked: JsonSchemaFormat | None) -> str:
    if asked is None or asked.schema is None:
        raise InvalidRequest(
            f"{_SCHEMA_PARAM} is missing or null, expected a JSON schema, as response_format.type is json_schema",
            param=_SCHEMA_PARAM,
        )
    return msgspec.json.encode(asked.schema).decode()


def _spec_text(param: str, kind: StructuredKind, value: Any) -> str:
    if kind == "json_object":
        return ""
    if kind == "choice" and not value:
        raise InvalidRequest(f"{param} is an empty array, expected one or more texts", param=param)
    if kind == "choice" and "" in value:
        at = f"{param}[{value.index('')}]"
        raise InvalidRequest(f"{at} is empty, expected a text of one character or more", param=at)
    if kind == "json_schema" and isinstance(value, str):
        return _checked_schema(param, value)
    if isinstance(value, str):
        if not value:
            raise InvalidRequest(f"{param} is empty, expected a {_TEXTS[kind]}", param=param)
        return value
    return msgspec.json.encode(value).decode()


def _checked_schema(param: str, text: str) -> str:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{param} is {short_json(schema)}, expected a JSON schema", param=param)
    return text


def _or_default(value: float | None, defaults: Mapping[str, float], name: str, otherwise: float) -> float:
    return defaults.get(name, otherwise) if value is None else value


def _top_k(fields: GenerationFields, card: ModelCard) -> int:
    top_k = int(_or_default(fields.top_k, card.default_sampling, "top_k", 0))
    return top_k if 0 < top_k < card.vocab_size else 0


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    """Keys are token ids, spelled as JSON names have to be."""
    by_id: dict[int, float] = {}
    for name, value in bias.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) < vocab_size):
            raise InvalidRequest(
                f"logit_bias has the key {short_json(name)}, expected a token id from 0 to {vocab_size - 1:,}",
                param="logit_bias",
            )
        if not -_MAX_BIAS <= value <= _MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias has {value:g} for token {name}, expected a number from -{_MAX_BIAS} to {_MAX_BIAS}",
                param="logit_bias",
            )
        by_id[int(name)] = value
    return by_id


def _stop_token_ids(ids: list[int], vocab_size: int) -> list[int]:
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"stop_token_ids has {token_id:,}, expected token ids from 0 to {vocab_size - 1:,}",
                param="stop_token_ids",
            )
    return ids
