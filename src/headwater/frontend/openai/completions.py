"""`POST /v1/completions`: from a body to a `Generation`. A prompt is a text, ids, or a list of either."""

from headwater.errors import InvalidRequest
from headwater.frontend.openai.completion_format import CompletionFormat, CompletionOptions
from headwater.frontend.openai.fields import COMPLETION_UNSUPPORTED
from headwater.frontend.openai.generation import Generation
from headwater.frontend.openai.logprobs import LogprobWriter
from headwater.frontend.openai.model import ModelLookup, ServedModel, served
from headwater.frontend.openai.parse import Shape, parse_body, short_json
from headwater.frontend.openai.preparation import Asker, stream_options
from headwater.frontend.openai.sampling import (
    sampling_params,
    stop_strings,
    structured_spec,
    text_options,
)
from headwater.frontend.openai.schema import MAX_PROMPTS, CompletionRequest, NvExt
from headwater.frontend.postprocess.stop import StopStrings
from headwater.frontend.preprocess.prompt import MostTokens, Prompt
from headwater.frontend.preprocess.tokenizer import pack_ids, unpack_ids

COMPLETION = Shape.of(CompletionRequest, COMPLETION_UNSUPPORTED)
DEFAULT_MAX_TOKENS = 16
_NO_NVEXT = NvExt()


def prepare_completion(body: bytes, models: ModelLookup, asker: Asker, *, strict: bool) -> Generation:
    """Raises `RequestError` and `Unavailable`. Safe to run in a thread."""
    parsed = parse_body(COMPLETION, body, strict=strict)
    fields = parsed.fields
    model = served(models, fields.model)
    options = stream_options(fields)
    structured = structured_spec(fields)
    logprobs = _logprob_writer(fields, model)
    choices = fields.n or 1
    prompts = _prompts(fields, model, model.namespace(asker.salt(fields), fields.model))
    if len(prompts) * choices > MAX_PROMPTS:
        raise InvalidRequest(
            f"{len(prompts):,} prompts with n = {choices} are {len(prompts) * choices:,} sequences, "
            f"at most {MAX_PROMPTS} fit",
            param="prompt",
        )
    asked = MostTokens(fields.max_tokens, "max_tokens", DEFAULT_MAX_TOKENS)
    max_tokens = [model.limits.fit_max_tokens(prompt.num_tokens, asked, "prompt") for prompt in prompts]
    echo = [_text_of(prompt, model) for prompt in prompts] if fields.echo else None
    stops = stop_strings(fields)
    nvext = fields.nvext or _NO_NVEXT
    return Generation(
        request_id=asker.request_id,
        model=model,
        prompts=prompts,
        choices_per_prompt=choices,
        sampling=[sampling_params(fields, model.card, most, fields.logprobs, structured) for most in max_tokens],
        text=text_options(fields),
        stops=StopStrings(stops) if stops else None,
        skip_special_tokens=fields.skip_special_tokens,
        format=CompletionFormat(
            asker.head("cmpl", fields.model, model),
            CompletionOptions(
                choices_per_prompt=choices,
                usage_in_events=options.include_usage,
                token_ids=bool(fields.return_token_ids),
                prompt_token_ids=[unpack_ids(prompt.ids) for prompt in prompts] if fields.return_token_ids else None,
                echo=echo,
                num_top_logprobs=fields.logprobs or 0,
                plain=not (options.continuous_usage_stats or fields.return_token_ids or nvext.extra_fields),
            ),
            logprobs,
        ),
        stream=bool(fields.stream),
        stream_options=options,
        nvext=nvext,
        adapter=model.adapter(fields.model),
        priority=asker.priority(fields),
        hints=asker.hints(fields),
        formatted_prompt=prompts[0].text,
        warnings=tuple(parsed.warnings),
    )


def _prompts(fields: CompletionRequest, model: ServedModel, namespace: bytes) -> list[Prompt]:
    given = fields.prompt
    if isinstance(given, str):
        return [_from_text(given, fields, model, namespace, "prompt")]
    if not given:
        raise InvalidRequest("prompt is an empty array, expected texts or token ids", param="prompt")
    if isinstance(given[0], int):
        return [_from_ids(given, model, namespace, "prompt")]
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(given):,} prompts, at most {MAX_PROMPTS} fit", param="prompt")
    prompts: list[Prompt] = []
    for number, item in enumerate(given):
        at = f"prompt[{number}]"
        if isinstance(item, str):
            prompts.append(_from_text(item, fields, model, namespace, at))
        elif isinstance(item, list):
            prompts.append(_from_ids(item, model, namespace, at))
        else:
            raise InvalidRequest(f"{at} is {item} among prompts, expected a text or token ids", param=at)
    return prompts


def _from_text(text: str, fields: CompletionRequest, model: ServedModel, namespace: bytes, at: str) -> Prompt:
    ids = model.limits.encode(model.tokenizer, text, at, add_special_tokens=fields.add_special_tokens)
    if not ids:
        raise InvalidRequest(f"{at} is empty, expected at least one token", param=at)
    return model.limits.prompt(ids, namespace, text)


def _from_ids(ids: list[int] | list[str | int | list[int]], model: ServedModel, namespace: bytes, at: str) -> Prompt:
    if not ids:
        raise InvalidRequest(f"{at} is empty, expected at least one token", param=at)
    model.limits.check_tokens(len(ids), at)
    for number, token_id in enumerate(ids):
        if not isinstance(token_id, int):
            raise InvalidRequest(
                f"{at}[{number}] is {short_json(token_id)} among token ids, expected an integer",
                param=f"{at}[{number}]",
            )
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"{at}[{number}] is {token_id}, expected a token id from 0 to {model.vocab_size - 1:,}",
                param=f"{at}[{number}]",
            )
    return model.limits.prompt(pack_ids([token_id for token_id in ids if isinstance(token_id, int)]), namespace)


def _text_of(prompt: Prompt, model: ServedModel) -> str:
    if prompt.text is not None:
        return prompt.text
    return model.tokenizer.decode(unpack_ids(prompt.ids), skip_special_tokens=False)


def _logprob_writer(fields: CompletionRequest, model: ServedModel) -> LogprobWriter | None:
    if fields.logprobs is None:
        return None
    if fields.echo:
        raise InvalidRequest(
            f"echo is true and logprobs is {fields.logprobs}, expected one of them: "
            "log probabilities of the prompt are not given",
            param="echo",
        )
    return LogprobWriter(model, as_token_ids=bool(fields.return_tokens_as_token_ids))
