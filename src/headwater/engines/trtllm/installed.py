"""The TensorRT-LLM that is installed: imported when an engine starts, and refused when this was not written for it."""

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from headwater.engines.trtllm_words import WRITTEN_FOR, is_known
from headwater.errors import ConfigError

_HINT = "pip install 'headwater[trtllm]', or attach a running trtllm-serve: --attach URL"


@dataclass(frozen=True, slots=True)
class Installed:
    """What is used of it."""

    version: str
    LLM: Any
    SamplingParams: Any
    GuidedDecodingParams: Any
    DisaggregatedParams: Any
    LoRARequest: Any
    RequestError: Any
    """Raised for one request; anything else is the engine's."""

    def takes(self, argument: str) -> bool:
        """Whether this release's `generate_async` knows an argument."""
        return argument in inspect.signature(self.LLM.generate_async).parameters


def load_installed() -> Installed:
    """Raises `ConfigError`."""
    try:
        package = import_module("tensorrt_llm")
        found = str(package.__version__)
        _check(found)
        llmapi, executor = import_module("tensorrt_llm.llmapi"), import_module("tensorrt_llm.executor")
    except ImportError as error:
        raise ConfigError(f"--engine trtllm needs TensorRT-LLM: {error}", hint=_HINT) from error
    try:
        return Installed(
            found,
            package.LLM,
            llmapi.SamplingParams,
            llmapi.GuidedDecodingParams,
            llmapi.DisaggregatedParams,
            executor.LoRARequest,
            executor.RequestError,
        )
    except AttributeError as error:
        raise ConfigError(f"TensorRT-LLM {found} is not as expected: {error}", hint=_HINT) from error


def _check(found: str) -> None:
    if not is_known(found):
        raise ConfigError(
            f"TensorRT-LLM {found} is installed: --engine trtllm is written for {WRITTEN_FOR}", hint=_HINT
        )
