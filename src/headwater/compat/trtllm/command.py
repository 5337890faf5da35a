"""A command line of `trtllm-serve`, and the `headwater serve` line that stands for it. Needs no TensorRT-LLM.

As with vLLM's: arguments of `tensorrt_llm.LLM` are passed on, those of the HTTP server have a flag of ours, or are done
anyway, or have no equivalent, which is said. A launcher in front of it (`mpirun`, `trtllm-llmapi-launch`) has none.
Written for TensorRT-LLM 1.4, and what 1.3 called otherwise.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from headwater.compat.translation import (
    FlagTable,
    TranslatedCommand,
    Translation,
    spelled,
    split_values,
    translated_command,
)
from headwater.config.words import flag_groups
from headwater.errors import ConfigError

_PROGRAM = "trtllm-serve"
_MODULE = "tensorrt_llm.commands.serve"
_SAME = ("--host", "--port", "--log-level", "--served-model-name", "--chat-template", "--tokenizer", "--revision")
_RENAMED = {
    "--max-batch-size": "--max-num-seqs",
    "--max-num-tokens": "--max-num-batched-tokens",
    "--max-seq-len": "--max-model-len",
    "--tp-size": "--tensor-parallel-size",
    "--tensor-parallel-size": "--tensor-parallel-size",
    "--num-serve-frontends": "--frontends",
    "--hf-revision": "--revision",
    "--config": "--extra-llm-api-options",
    "--extra-llm-api-options": "--extra-llm-api-options",
    "--no-telemetry": "--telemetry-config.disabled",
}
_ALWAYS = {
    "--tool-parser": "the format is recognised by the model's template",
    "--num-postprocess-workers": "frontends turn tokens into texts: --frontends",
    "--num-input-processor-workers": "frontends tokenize: --frontends",
    "--telemetry": "TensorRT-LLM's own default",
    "--fail-fast-on-attention-window-too-large": "has no effect in TensorRT-LLM any more",
}
_MEDIA = "images and the like are not taken in the worker: attach the server as `openai`"
_PICTURES = "texts are generated, not pictures"
_REGISTRY = "workers find each other in the registry: --registry"
_NO_CODE = "no code of others runs in the frontend"
_NONE = {
    "--reasoning-parser": "reasoning is left in the text",
    "--custom-module-dirs": "no code is imported by its path: install it where the worker runs",
    "--metadata-server-config-file": _REGISTRY,
    "--disagg-cluster-uri": _REGISTRY,
    "--server-role": "headwater worker --role prefill, or decode",
    "--media-io-kwargs": _MEDIA,
    "--video-pruning-rate": _MEDIA,
    "--num-media-load-workers": _MEDIA,
    "--enable-visual-gen": _PICTURES,
    "--visual-gen-args": _PICTURES,
    "--extra-visual-gen-options": _PICTURES,
    "--grpc": "the API is HTTP",
    "--middleware": _NO_CODE,
    "--post-processor-hook": _NO_CODE,
    "--allow-request-chat-template": "the template is set by whoever runs the server",
    "--agent-percentage": "requests tell of no agents: give them a priority",
    "--agent-types": "requests tell of no agents: give them a priority",
    "--report-addr": "say the port: --port",
    "--backend": "the worker runs the PyTorch backend: attach a server of another one",
    "--max-beam-width": "beam search is not offered",
    "--generation-config": "what the model says of sampling (generation_config.json) counts: say it in the request",
}
TABLE = FlagTable(_SAME, _RENAMED, _ALWAYS, _NONE)
_AS_IT_IS: Mapping[tuple[str, ...], str] = {
    ("--backend", "pytorch"): "the backend that the worker runs",
    ("--max-beam-width", "1"): "beam search is not offered",
    ("--generation-config", "auto"): "what the model says of sampling is the default",
}
"""Flags without an equivalent, where they say what is so anyway."""
_SWITCHES = (
    "--trust-remote-code",
    "--telemetry",
    "--no-telemetry",
    "--fail-fast-on-attention-window-too-large",
    "--enable-chunked-prefill",
    "--enable-attention-dp",
    "--allow-request-chat-template",
    "--grpc",
    "--enable-visual-gen",
)
"""Flags without a value: a word that follows is the model."""
_LOG_LEVELS = {"internal_error": "error", "verbose": "debug", "trace": "debug"}
_OTHER_VERBS = {
    "disaggregated": "it routes between servers: start a worker for each of its context servers, `headwater worker "
    "--attach URL --role prefill`, for each generation server with `--role decode`, and `headwater frontend`, all with "
    "the same --registry",
    "disaggregated_mpi_worker": "start workers: headwater worker MODEL --engine trtllm --role prefill, or decode",
    "mm_embedding_serve": "images are not encoded on their own",
    "embeddings": "TensorRT-LLM's embeddings are not offered",
}
_EXPECTED = "expected `trtllm-serve MODEL [flags]`"
_LAUNCHED = (
    "an engine of several nodes is not started by a worker: leave the line as it is, and attach the server: "
    "headwater serve --attach URL"
)


def is_trtllm(words: Sequence[str]) -> bool:
    return _start(words) is not None


def translate(words: Sequence[str]) -> TranslatedCommand:
    """From the words of a command line that starts `trtllm-serve`. Raises `ConfigError`."""
    start = _start(words)
    if start is None:
        raise ConfigError("this is no line of trtllm-serve", hint=_EXPECTED)
    arguments = split_values(words[start:])
    if arguments[:1] == ["serve"]:
        del arguments[0]
    if arguments and arguments[0] in _OTHER_VERBS:
        raise ConfigError(f"`{_PROGRAM} {arguments[0]}` starts no engine", hint=_OTHER_VERBS[arguments[0]])
    found = translated_command("trtllm", _groups(arguments), _translation, _EXPECTED)
    return replace(found, flags=[*_launcher(words[: start - 1]), *found.flags])


def _translation(group: list[str]) -> Translation:
    flag = spelled(group[0])
    if (flag, *group[1:]) in _AS_IT_IS:
        return Translation(group, "always", [], _AS_IT_IS[flag, *group[1:]])
    match flag, *group[1:]:
        case "--log-level", level:
            return Translation(group, "same", [flag, _LOG_LEVELS.get(level, level)])
        case "--chat-template", template if "{" in template:
            return Translation(group, "none", [], "write the template to a file, and name that")
        case "--set", assignment:
            path, _, value = assignment.partition("=")
            return Translation(group, "renamed", ["--" + path.replace("_", "-"), value])
        case _:
            return TABLE.translation(group)


def _launcher(words: Sequence[str]) -> list[Translation]:
    """What starts the program, where that is more than Python; variables of the environment mean here what they do
    there."""
    own = [word for word in words if not re.match("[A-Z_]+=", word)]
    plain = not own or (own[-1] == "-m" and len(own) == 2)
    return [] if plain else [Translation(own, "none", [], _LAUNCHED)]


def _groups(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with its value, if it takes one; other words each on their own."""
    for flag, *values in flag_groups(arguments):
        most = 1 if flag.startswith("-") and spelled(flag) not in _SWITCHES else 0
        yield [flag, *values[:most]]
        yield from ([value] for value in values[most:])


def _start(words: Sequence[str]) -> int | None:
    """Where the arguments begin, if this is a line of `trtllm-serve`."""
    for number, word in enumerate(words, 1):
        if word == _MODULE or word.rpartition("/")[2] == _PROGRAM:
            return number
    return None
