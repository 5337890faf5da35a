"""Rotary tables against transformers' own rotary embeddings."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headwater.engines.native.base import NativeModelConfig, RopeConfig
from headwater.engines.native.checkpoints.config import parse_config
from headwater.engines.native.rope import rope_tables
from headwater.errors import ModelError

ORIGINAL = 512
DIM = 64
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "large-theta": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.707,
        "mscale_all_dim": 0.5,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
        "rope_theta": 500_000.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(DIM // 2)],
        "long_factor": [1.0 + 0.5 * i for i in range(DIM // 2)],
        "original_max_position_embeddings": 256,
    },
    "longrope-factor": {
        "rope_type": "longrope",
        "factor": 32.0,
        "short_factor": [1.0] * (DIM // 2),
        "long_factor": [2.0] * (DIM // 2),
        "original_max_position_embeddings": 256,
    },
}


def both_configs(scaling: dict[str, Any]) -> tuple[Any, NativeModelConfig]:
    theirs = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=2 * DIM,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=8,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_theta": 10_000.0} | scaling,
        architectures=["LlamaForCausalLM"],
    )
    return theirs, parse_config(theirs.to_dict())


def expected_tables(config: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.empty(1, dtype=torch.float32), torch.arange(length)[None])
    return cos[0], sin[0]


def assert_tables(scaling: dict[str, Any], length: int) -> None:
    theirs, ours = both_configs(scaling)
    for got, expected in zip(rope_tables(ours, length), expected_tables(theirs, length), strict=True):
        assert got.dtype == np.float32
        assert got.shape == (length, DIM)
        torch.testing.assert_close(torch.from_numpy(got), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", SCALINGS)
def test_within_the_original_length(name: str) -> None:
    assert_tables(SCALINGS[name], 200)


@pytest.mark.parametrize("name", SCALINGS)
def test_beyond_the_original_length(name: str) -> None:
    """A table of that length is that of one sequence of that length."""
    assert_tables(SCALINGS[name], 2 * ORIGINAL)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_short_tables_ignore_how_long_others_are(name: str) -> None:
    """A table may be cut anywhere below the original length."""
    _, config = both_configs(SCALINGS[name])
    long, short = rope_tables(config, 256), rope_tables(config, 100)
    assert np.array_equal(long[0][:100], short[0])
    assert np.array_equal(long[1][:100], short[1])


def test_explicit_divisors_equal_linear_scaling() -> None:
    _, config = both_configs(SCALINGS["linear"])
    divided = replace(config, rope=RopeConfig(10_000.0, "divisors", (("divisors", (4.0,) * (DIM // 2)),)))
    np.testing.assert_allclose(rope_tables(divided, 300)[0], rope_tables(config, 300)[0], atol=1e-6)


def test_parameters_of_the_wrong_number_are_refused() -> None:
    _, config = both_configs(SCALINGS["longrope"])
    short = replace(config, head_dim=32)
    with pytest.raises(ModelError, match="16 values of short_factor"):
        rope_tables(short, 10)


def test_missing_parameters_are_named() -> None:
    _, config = both_configs(SCALINGS["default"])
    with pytest.raises(ModelError, match="lack factor"):
        rope_tables(replace(config, rope=RopeConfig(10_000.0, "linear")), 10)
