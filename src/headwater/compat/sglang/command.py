"""A command line that starts SGLang's server, and the `headwater serve` line that stands for it. Needs no SGLang.

As with vLLM's: flags of the engine are passed on as they are, those of the HTTP server have a flag of ours, or are done
anyway, or have no equivalent, which is said. Written for SGLang 0.5.23.
"""

from collections.abc import Sequence

from headwater.compat.translation import FlagTable, TranslatedCommand, split_values, translated_command
from headwater.config.words import flag_groups

_MODULE = "sglang.launch_server"
_MODEL = ("--model-path", "--model")
_SAME = (
    "--host",
    "--port",
    "--api-key",
    "--served-model-name",
    "--chat-template",
    "--dtype",
    "--revision",
    "--log-level",
)
_RENAMED = {
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--page-size": "--block-size",
    "--tokenizer-path": "--tokenizer",
    "--tp-size": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--tensor-parallel-size": "--tensor-parallel-size",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--ssl-ca-certs": "--tls-client-ca",
}
_ALWAYS = {
    "--enable-metrics": "/metrics is always there",
    "--enable-cache-report": "usage always says how many prompt tokens were cached",
    "--incremental-streaming-output": "nothing is sent twice",
    "--tool-call-parser": "the format is recognised by the model's template",
    "--skip-server-warmup": "SGLang's HTTP server does not run here",
    "--tokenizer-worker-num": "frontends tokenize: --frontends",
    "--log-level-http": "--log-level",
}
_NONE = {
    "--reasoning-parser": "reasoning is left in the text",
    "--skip-tokenizer-init": "SGLang's grammars want its tokenizer",
    "--allow-auto-truncate": "what does not fit is refused",
    "--admin-api-key": "see --operator-key",
    "--fastapi-root-path": "strip the prefix in the proxy",
    "--ssl-keyfile-password": "give a key without a password",
    "--enable-ssl-refresh": "restart a frontend; others go on",
    "--grpc-mode": "the API is HTTP",
    "--smg-grpc-mode": "the API is HTTP",
    "--enable-http2": "the API is HTTP/1.1",
    "--completion-template": "prompts of completions are taken as they are",
    "--default-chat-template-kwargs": "give chat_template_kwargs in the request",
    "--trust-request-chat-template": "the template is set by whoever runs the server",
    "--log-requests": "texts are never logged",
    "--log-requests-level": "texts are never logged",
    "--file-storage-path": "files are not taken",
    "--tool-server": "tools are the client's",
}
TABLE = FlagTable(_SAME, _RENAMED, _ALWAYS, _NONE)
_EXPECTED = "python -m sglang.launch_server --model-path MODEL [flags]"


def is_sglang(words: Sequence[str]) -> bool:
    return _MODULE in words or list(words[:2]) == ["sglang", "serve"]


def translate(words: Sequence[str]) -> TranslatedCommand:
    """From the words of a command line that starts SGLang's server. Raises `ConfigError`."""
    groups = flag_groups(_arguments(words))
    return translated_command("sglang", groups, TABLE.translation, _EXPECTED, model_flags=_MODEL, bare_model=False)


def _arguments(words: Sequence[str]) -> list[str]:
    """What comes after the program's name, `--flag=value` as two words."""
    start = words.index(_MODULE) + 1 if _MODULE in words else 2
    return split_values(words[start:])
