"""Our sampling parameters in vLLM's words. Every field has a place; what vLLM cannot do is refused."""

from typing import Any

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from headwater.engines.limits import check_resumable
from headwater.errors import InvalidRequest
from headwater.protocol.request import SamplingParams, StructuredSpec

_MAX_SEED = 2**63 - 1


def vllm_sampling(
    params: SamplingParams, num_resumed: int, kv_params: dict[str, Any] | None = None
) -> VllmSamplingParams:
    """`num_resumed`: tokens generated elsewhere, which vLLM gets as prompt; `kv_params`: for its KV connector.

    Raises `InvalidRequest`."""
    check_resumable(params, num_resumed, "vLLM")
    try:
        return VllmSamplingParams(
            max_tokens=params.max_tokens - num_resumed,
            min_tokens=max(0, params.min_tokens - num_resumed),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=dict(params.logit_bias) or None,
            # A generator per sequence costs vLLM time in every step: only for clients that asked for a seed.
            seed=None if params.seed_drawn or params.temperature == 0 else (params.seed + num_resumed) & _MAX_SEED,
            logprobs=params.logprobs,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.goes_past_end,
            structured_outputs=_structured(params.structured),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
            extra_args={"kv_transfer_params": kv_params} if kv_params is not None else None,
        )
    except (VLLMClientError, ValueError) as error:
        raise refusal(error) from error


def refusal(error: Exception) -> InvalidRequest:
    """In vLLM's words, by the field that it names, if it does."""
    param: str | None = getattr(error, "parameter", None)
    return InvalidRequest(f"vLLM: {error if param is None else error.args[0]}", param=param)


def _structured(spec: StructuredSpec | None) -> StructuredOutputsParams | None:
    if spec is None:
        return None
    match spec.kind:
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=spec.spec)
        case "regex":
            return StructuredOutputsParams(regex=spec.spec)
        case "choice":
            return StructuredOutputsParams(choice=msgspec.json.decode(spec.spec, type=list[str]))
        case _:
            return StructuredOutputsParams(grammar=spec.spec)
