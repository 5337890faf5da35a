"""Requests of the OpenAI API as typed structs, with the extra fields that users of vLLM and Dynamo know.

The structs say what is accepted; meaning across fields is checked in `sampling` and in the endpoints. Fields that are
known and not supported are listed in `fields`.
"""

from typing import Annotated, Any

import msgspec

_MAX_INT = 2**63 - 1
MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TOOLS = 512
MAX_PROMPTS = 256


def _about(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
TokenCount = Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=_MAX_INT)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopList = Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOP_STRINGS)]
StopTokenIds = Annotated[list[TokenId], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)]
LogprobCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
WorkerName = int | Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct):
    include_usage: Annotated[bool, _about("Send a last event with the usage.")] = False
    continuous_usage_stats: Annotated[bool, _about("Put the usage so far into every event.")] = False


class JsonSchemaFormat(msgspec.Struct):
    name: str = "response"
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: Annotated[str, _about("text, json_object or json_schema")]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's way to ask for structured output; one of the members."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    """This and what follows is known, and refused: an answer that does not keep to it would be a wrong one."""
    whitespace_pattern: Any = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None


class AgentHints(msgspec.Struct):
    """Unknown members are ignored."""

    priority: Priority | None = None
    strict_priority: Priority | None = None
    osl: Annotated[int, msgspec.Meta(ge=0)] | None = None
    latency_sensitivity: float | None = None
    speculative_prefill: bool | None = None
    prefix_id: str | None = None
    iat: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Milliseconds until the next turn."""


class NvExt(msgspec.Struct):
    """Dynamo's extension object. Members without a use here are accepted and ignored."""

    agent_hints: AgentHints | None = None
    cache_salt: Salt | None = None
    greed_sampling: bool | None = None
    annotations: list[str] = []
    extra_fields: list[str] = []
    backend_instance_id: WorkerName | None = None
    decode_worker_id: WorkerName | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and plain completions have in common."""

    model: str
    max_tokens: Annotated[TokenCount | None, _about("Most tokens to generate.")] = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT)] = 0
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=_MAX_INT, description="0 or -1: no limit.")] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=1e-6, le=10)] | None = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Seed | None = None
    stop: StopString | StopList | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[Priority, _about("As in vLLM: lower is served earlier.")] | None = None
    cache_salt: Annotated[Salt, _about("Requests share cached prefixes only with the same salt.")] | None = None
    prompt_cache_key: Annotated[str | None, _about("A session: its requests go to the same worker.")] = None
    user: Annotated[str | None, _about("The same, where no better name is given.")] = None
    nvext: NvExt | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    """What a part of that type says."""


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """One message. Further members reach the chat template as they are."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


MessageList = Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]


class FunctionDefinition(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: FunctionDefinition
    type: str = "function"


class NamedFunction(msgspec.Struct):
    name: str


class NamedToolChoice(msgspec.Struct):
    function: NamedFunction
    type: str = "function"


ToolList = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]


class ChatRequest(GenerationFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: MessageList
    tools: ToolList | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool = False
    max_completion_tokens: Annotated[TokenCount | None, _about("Newer name of max_tokens; wins over it.")] = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: LogprobCount | None = None
    add_special_tokens: bool = True


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a prompt or messages."""

    model: str
    messages: MessageList | None = None
    tools: ToolList | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    """`POST /detokenize`."""

    model: str
    tokens: list[TokenId]
