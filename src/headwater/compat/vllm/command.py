"""A command line of `vllm serve`, and the `headwater serve` line that stands for it. Needs no vLLM.

Flags of vLLM's engine are passed on as they are, and vLLM's own parser judges them when the worker starts. So are those
that are of neither, which is said: a slip, or a release other than the one this was written for. Flags of vLLM's HTTP
server are ours to answer: each has a flag of ours, or is done anyway, or has no equivalent, which is said.
"""

from collections.abc import Sequence

from headwater.compat.translation import (
    FlagTable,
    TranslatedCommand,
    Translation,
    spelled,
    split_values,
    translated_command,
)
from headwater.compat.vllm.engine_flags import is_engine_flag
from headwater.config.words import flag_groups
from headwater.errors import ConfigError

_SAME = ("--host", "--port", "--api-key", "--served-model-name", "--chat-template", "--lora-modules")
_OURS_TOO = ("--dtype", "--max-model-len", "--block-size", "--max-num-seqs", "--max-num-batched-tokens", "--tokenizer")
_RENAMED = {
    "--uvicorn-log-level": "--log-level",
    "--api-server-count": "--frontends",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--ssl-ca-certs": "--tls-client-ca",
}
_ALWAYS = {
    "--enable-auto-tool-choice": "tool calls are recognised by the model's template",
    "--tool-call-parser": "the format is recognised by the model's template",
    "--chat-template-content-format": "texts and parts are both taken",
    "--enable-prompt-tokens-details": "usage always says how many prompt tokens were cached",
    "--enable-request-id-headers": "every answer has x-request-id",
    "--enable-server-load-tracking": "load is in /metrics and `headwater status`",
    "--return-tokens-as-token-ids": "a field of the request",
    "--enable-tokenizer-info-endpoint": "/tokenize and /detokenize are there",
    "--enable-force-include-usage": "stream_options.include_usage in the request",
    "--disable-uvicorn-access-log": "--log-level warning leaves out the lines of requests",
    "--disable-access-log-for-endpoints": "pages that are polled are not logged",
    "--response-role": "the role is `assistant`",
}
_NONE = {
    "--allowed-origins": "use --cors ORIGIN",
    "--allowed-methods": "CORS allows those that the API has",
    "--allowed-headers": "CORS allows those that the API reads",
    "--allow-credentials": "CORS without cookies: keys travel in a header",
    "--uds": "the port is TCP",
    "--root-path": "strip the prefix in the proxy",
    "--middleware": "no code of others runs in the frontend",
    "--ssl-cert-reqs": "a client CA asks for certificates",
    "--ssl-ciphers": "those of the system's library",
    "--enable-ssl-refresh": "restart a frontend; others go on",
    "--reasoning-parser": "reasoning is left in the text",
    "--grpc": "the API is HTTP",
    "--grpc-port": "the API is HTTP",
    "--headless": "start more workers: headwater worker",
    "--config": "write its keys as flags, or in a file of ours",
    "--log-config-file": "--log-format json",
    "--disable-fastapi-docs": "/docs and /openapi.json are always there",
    "--enable-offline-docs": "/docs needs no network",
    "--h11-max-incomplete-event-size": "see --max-body",
    "--h11-max-header-count": "heads are bounded",
    "--tool-parser-plugin": "formats are recognised by the model's template",
    "--tool-server": "tools are the client's",
    "--enable-log-outputs": "texts are never logged",
    "--max-log-len": "texts are never logged",
    "--enable-log-deltas": "texts are never logged",
    "--log-error-stack": "--log-level debug",
    "--default-chat-template-kwargs": "give chat_template_kwargs in the request",
    "--exclude-tools-when-tool-choice-none": "the template decides",
    "--fingerprint-mode": "system_fingerprint names the model's fingerprint",
    "--fingerprint-value": "system_fingerprint names the model's fingerprint",
    "--sse-keep-alive-interval": "silent streams say that they live every five seconds",
    "--trust-request-chat-template": "the template is set by whoever runs the server",
    "--trust-request-mm-kwargs": "media are not taken",
    "--enable-per-request-metrics": "nvext.extra_fields with timing, in the request",
    "--tokens-only": "prompts may be token ids, and return_token_ids asks for them",
    "--tool-strict-level": "tool arguments are checked by the client",
    "--enable-scale-out": "start more workers: headwater worker",
    "--data-parallel-supervisor-port": "workers are supervised by headwater serve",
    "--dp-supervisor-probe-failure-threshold": "workers are supervised by headwater serve",
    "--dp-supervisor-probe-interval-s": "workers are supervised by headwater serve",
    "--dp-supervisor-probe-timeout-s": "workers are supervised by headwater serve",
    "--enable-flash-late-interaction": "texts are generated, not scored",
    "--anthropic-disabled-thinking-effort": "belongs to another API",
    "--cohere-format": "the template decides",
    "--cohere-is-reasoning-model": "the template decides",
}
_EXPECTED = (
    "expected `vllm serve MODEL [flags]`, `python -m sglang.launch_server --model-path MODEL [flags]` or `trtllm-serve "
    "MODEL [flags]`"
)
_LISTS = ("--api-key", "--served-model-name")
_DTYPES = {"half": "float16", "float": "float32"}


TABLE = FlagTable((*_SAME, *_OURS_TOO), _RENAMED, _ALWAYS, _NONE, is_engine_flag)


def translate(words: Sequence[str]) -> TranslatedCommand:
    """From the words of a command line that starts vLLM's server. Raises `ConfigError`."""
    groups = flag_groups(_arguments(words))
    return translated_command("vllm", groups, _translation, _EXPECTED, model_flags=("--model",))


def _translation(group: list[str]) -> Translation:
    flag = spelled(group[0])
    if flag in _LISTS:
        return Translation(group, "same", [word for value in group[1:] for word in (flag, value)])
    if flag == "--dtype":
        return Translation(group, "same", [flag, *(_DTYPES.get(value, value) for value in group[1:])])
    return TABLE.translation(group)


def _arguments(words: Sequence[str]) -> list[str]:
    """What comes after the program's name, `--flag=value` as two words."""
    left = list(words)
    if left[:2] == ["vllm", "serve"]:
        left = left[2:]
    elif "vllm.entrypoints.openai.api_server" in left:
        left = left[left.index("vllm.entrypoints.openai.api_server") + 1 :]
    elif "-m" in left:
        raise ConfigError(f"`{' '.join(left[: left.index('-m') + 2])}` starts no server that is known", hint=_EXPECTED)
    elif left[:1] == ["vllm"]:
        raise ConfigError(f"`{' '.join(left[:2])}` serves nothing", hint="expected `vllm serve MODEL [flags]`")
    return split_values(left)
