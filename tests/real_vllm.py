"""Tests on real vLLM, which runs in an interpreter of its own; for whoever has it:

VLLM_PYTHON=build/peers/vllm/bin/python pytest -m vllm      (bench/peers/setup vllm makes that interpreter)
"""

import json
import os
from pathlib import Path

import pytest

import model_fixtures

VLLM_PYTHON = os.environ.get("VLLM_PYTHON")


def needs_vllm(timeout_s: float) -> list[pytest.MarkDecorator]:
    """Marks of a module of them."""
    return [
        pytest.mark.vllm,
        pytest.mark.timeout(timeout_s),
        pytest.mark.skipif(VLLM_PYTHON is None, reason="VLLM_PYTHON names no interpreter with vLLM"),
    ]


def tiny_model(folder: Path, num_kv_heads: int = 1) -> Path:
    """Of a shape that vLLM's CPU kernels take; the folder again."""
    heads = {"head_dim": 32, "num_attention_heads": 2 * num_kv_heads, "num_key_value_heads": num_kv_heads}
    shape = {"tie_word_embeddings": True, "max_position_embeddings": 1024, **heads}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model_fixtures.FAMILIES, "llama", ("Llama", shape))
        model_fixtures.build_tiny_model(folder, "llama", "default")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
