"""`POST /v1/chat/completions`: from a body to a `Generation`."""

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.errors import ContextTooLong, InvalidRequest
from headwater.frontend.openai.chat_format import ChatFormat, ChatOptions
from headwater.frontend.openai.fields import CHAT_UNSUPPORTED
from headwater.frontend.openai.generation import Generation
from headwater.frontend.openai.logprobs import LogprobWriter
from headwater.frontend.openai.messages import num_content_chars, template_messages
from headwater.frontend.openai.model import ModelLookup, ServedModel, served
from headwater.frontend.openai.parse import Plain, Shape, parse_body, short_json
from headwater.frontend.openai.preparation import Asker, stream_options
from headwater.frontend.openai.sampling import (
    sampling_params,
    stop_strings,
    structured_spec,
    text_options,
)
from headwater.frontend.openai.schema import ChatMessage, ChatRequest, NvExt, TokenizeRequest
from headwater.frontend.openai.tool_choice import tool_use
from headwater.frontend.postprocess.stop import StopStrings
from headwater.frontend.preprocess.prompt import MostTokens
from headwater.frontend.preprocess.template import ChatTemplate
from headwater.frontend.preprocess.tokenizer import unpack_ids

TemplateFields = ChatRequest | TokenizeRequest
"""Requests that say how messages become a prompt."""

CHAT = Shape.of(ChatRequest, CHAT_UNSUPPORTED)
_NO_NVEXT = NvExt()


def prepare_chat(body: bytes, models: ModelLookup, asker: Asker, *, strict: bool) -> Generation:
    """Raises `RequestError` and `Unavailable`. Safe to run in a thread."""
    parsed = parse_body(CHAT, body, strict=strict)
    fields = parsed.fields
    model = served(models, fields.model)
    options = stream_options(fields)
    num_top = _num_top_logprobs(fields)
    tools = tool_use(fields, model, structured_spec(fields))
    text = prompt_text(fields.messages, fields, parsed.plain, model, tools_shown=tools.shown)
    ids = model.limits.encode(model.tokenizer, text, "messages", add_special_tokens=fields.add_special_tokens)
    prompt = model.limits.prompt(ids, model.namespace(asker.salt(fields), fields.model), text)
    max_tokens = model.limits.fit_max_tokens(prompt.num_tokens, _most_tokens(fields), "messages")
    stops = stop_strings(fields)
    nvext = fields.nvext or _NO_NVEXT
    choices = fields.n or 1
    return Generation(
        request_id=asker.request_id,
        model=model,
        prompts=[prompt],
        choices_per_prompt=choices,
        sampling=[sampling_params(fields, model.card, max_tokens, num_top, tools.structured)],
        text=text_options(fields),
        stops=StopStrings(stops) if stops else None,
        skip_special_tokens=fields.skip_special_tokens,
        format=ChatFormat(
            asker.head("chatcmpl", fields.model, model),
            ChatOptions(
                usage_in_events=options.include_usage,
                token_ids=bool(fields.return_token_ids),
                prompt_token_ids=unpack_ids(ids) if fields.return_token_ids else None,
                plain=not (options.continuous_usage_stats or fields.return_token_ids or nvext.extra_fields),
            ),
            _logprob_writer(fields, model, num_top),
            tools.parsers(choices),
        ),
        stream=bool(fields.stream),
        stream_options=options,
        nvext=nvext,
        prompt_param="messages",
        adapter=model.adapter(fields.model),
        priority=asker.priority(fields),
        hints=asker.hints(fields),
        formatted_prompt=text,
        warnings=tuple(parsed.warnings),
    )


def prompt_text(
    messages: Sequence[ChatMessage], fields: TemplateFields, plain: Plain, model: ServedModel, *, tools_shown: bool
) -> str:
    """The conversation through the model's template. Raises `RequestError`."""
    template = model.template
    if template is None:
        raise InvalidRequest(f"model {model.card.name} has no chat template: use /v1/completions", param="messages")
    shown = _checked_messages(messages, plain, model, template)
    if fields.continue_final_message and fields.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message are both true, expected at most one",
            param="continue_final_message",
        )
    generation_prompt = fields.add_generation_prompt
    return template.render(
        shown,
        tools=plain["tools"] if tools_shown else None,
        add_generation_prompt=not fields.continue_final_message if generation_prompt is None else generation_prompt,
        continue_final_message=fields.continue_final_message,
        extra=_template_variables(fields),
    )


def _checked_messages(
    messages: Sequence[ChatMessage], plain: Plain, model: ServedModel, template: ChatTemplate
) -> list[Plain]:
    if len(messages) >= model.card.max_model_len:
        raise ContextTooLong(
            f"there are {len(messages):,} messages, the model's context is {model.card.max_model_len:,} tokens",
            param="messages",
        )
    model.limits.check_chars(num_content_chars(messages), "messages")
    return template_messages(messages, plain["messages"], knows_developer=template.knows_developer)


_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


def _template_variables(fields: TemplateFields) -> Mapping[str, Any] | None:
    given = fields.chat_template_kwargs
    if given is None and fields.documents is None and fields.reasoning_effort is None:
        return None
    variables = dict(given or {})
    for name in variables:
        if name in _RESERVED:
            raise InvalidRequest(
                f"chat_template_kwargs has {short_json(name)}, which has a field of its own or is not for requests",
                param="chat_template_kwargs",
            )
    if fields.documents is not None:
        variables["documents"] = fields.documents
    if fields.reasoning_effort is not None:
        variables["reasoning_effort"] = fields.reasoning_effort
    return variables


def _most_tokens(fields: ChatRequest) -> MostTokens:
    if fields.max_completion_tokens is not None:
        return MostTokens(fields.max_completion_tokens, "max_completion_tokens")
    return MostTokens(fields.max_tokens, "max_tokens")


def _num_top_logprobs(fields: ChatRequest) -> int | None:
    if not fields.logprobs:
        if fields.top_logprobs:
            raise InvalidRequest(
                f"top_logprobs is {fields.top_logprobs} and logprobs is not true", param="top_logprobs"
            )
        return None
    return fields.top_logprobs or 0


def _logprob_writer(fields: ChatRequest, model: ServedModel, num_top: int | None) -> LogprobWriter | None:
    if num_top is None:
        return None
    return LogprobWriter(model, as_token_ids=bool(fields.return_tokens_as_token_ids))
