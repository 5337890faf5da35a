"""vLLM's offline interface on any engine: `from headwater.compat.vllm import LLM, SamplingParams`."""

from headwater.compat.vllm.llm import LLM
from headwater.compat.vllm.outputs import CompletionOutput, Logprob, RequestOutput
from headwater.compat.vllm.params import SamplingParams, StructuredOutputsParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]
