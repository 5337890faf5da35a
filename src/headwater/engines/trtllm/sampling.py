"""Our sampling parameters in TensorRT-LLM's words. Every field has a place; what it cannot do is refused."""

from collections.abc import Sequence
from typing import Any

from headwater.engines.trtllm.installed import Installed
from headwater.engines.trtllm_words import choice_regex, num_resumed, schema_of, seed_of
from headwater.errors import InvalidRequest
from headwater.protocol.request import EngineRequest, StructuredSpec

_NO_END = -1


def trtllm_sampling(installed: Installed, request: EngineRequest, ends: Sequence[int], vocab_size: int) -> Any:
    """`ends`: the model's end tokens. Raises `InvalidRequest`."""
    params, resumed = request.sampling, num_resumed(request)
    more_ends = [] if params.goes_past_end else list(ends[1:])
    try:
        return installed.SamplingParams(
            end_id=ends[0] if ends else _NO_END,
            pad_id=ends[0] if ends else 0,
            max_tokens=params.max_tokens - resumed,
            min_tokens=max(0, params.min_tokens - resumed) or None,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=1 if params.temperature == 0 else params.top_k or None,
            min_p=params.min_p or None,
            presence_penalty=params.presence_penalty or None,
            frequency_penalty=params.frequency_penalty or None,
            repetition_penalty=None if params.repetition_penalty == 1 else params.repetition_penalty,
            embedding_bias=_biases(params.logit_bias, vocab_size),
            seed=seed_of(request, resumed),
            logprobs=None if params.logprobs is None else max(1, params.logprobs),
            stop_token_ids=[*params.stop_token_ids, *more_ends] or None,
            # Stop tokens that are left out of the ids would not be left out of their log probabilities.
            include_stop_str_in_output=True,
            ignore_eos=params.goes_past_end,
            guided_decoding=_structured(installed, params.structured),
            detokenize=False,
            add_special_tokens=False,
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"TensorRT-LLM: {error}") from error


def _biases(biases: dict[int, float], vocab_size: int) -> Any:
    if not biases:
        return None
    import torch

    found = torch.zeros(vocab_size, dtype=torch.float32)
    for token, bias in biases.items():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias has the key {token}, expected a token id from 0 to {vocab_size - 1}", param="logit_bias"
            )
        found[token] = bias
    return found


def _structured(installed: Installed, spec: StructuredSpec | None) -> Any:
    if spec is None:
        return None
    match spec.kind:
        case "json_object":
            return installed.GuidedDecodingParams(json_object=True)
        case "json_schema":
            return installed.GuidedDecodingParams(json=schema_of(spec))
        case "regex":
            return installed.GuidedDecodingParams(regex=spec.spec)
        case "choice":
            return installed.GuidedDecodingParams(regex=choice_regex(spec))
        case _:
            return installed.GuidedDecodingParams(grammar=spec.spec)
