"""Model files under Hugging Face names, read lazily: safetensors and GGUF."""

from headwater.engines.native.base import Checkpoint
from headwater.engines.native.checkpoints.gguf import GgufCheckpoint
from headwater.engines.native.checkpoints.safetensors import SafetensorsCheckpoint
from headwater.weights import ResolvedModel

__all__ = ["GgufCheckpoint", "SafetensorsCheckpoint", "open_checkpoint"]


def open_checkpoint(model: ResolvedModel) -> Checkpoint:
    """Map the weights and read the configuration. Raises `ModelError` for what the native engine cannot run.

    Token ids that end a sequence come from the resolved model: publishers keep them in generation_config.json.
    """
    if model.kind == "gguf":
        return GgufCheckpoint(model)
    return SafetensorsCheckpoint(model)
