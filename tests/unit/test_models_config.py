"""config.json -> NativeModelConfig: families, both rotary layouts, sliding windows, refusals."""

from typing import Any

import pytest

from headwater.engines.native.base import NativeModelConfig, RopeConfig
from headwater.engines.native.checkpoints.config import check_config, parse_config
from headwater.engines.native.checkpoints.layout import check_shapes, expected_shapes
from headwater.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def test_defaults_are_derived() -> None:
    config = parse_config(LLAMA)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert not config.tie_word_embeddings
    assert config.rope == RopeConfig(10_000.0)
    assert config.sliding_window is None
    assert (config.attention_bias, config.mlp_bias, config.qk_norm) == (False, False, False)


@pytest.mark.parametrize(
    ("source", "biased", "output_biased", "normed"),
    [
        (LLAMA | {"attention_bias": True}, True, True, False),
        (QWEN2, True, False, False),
        (QWEN3, False, False, True),
        (QWEN3 | {"attention_bias": True}, True, True, True),
        (MISTRAL, False, False, False),
    ],
)
def test_biases_and_norms_by_family(source: dict[str, Any], biased: bool, output_biased: bool, normed: bool) -> None:
    config = parse_config(source)
    assert (config.attention_bias, config.attention_output_bias, config.qk_norm) == (biased, output_biased, normed)


def test_the_head_size_may_be_given() -> None:
    assert parse_config(LLAMA | {"head_dim": 24}).head_dim == 24
    assert parse_config(QWEN3).head_dim == 128, "Qwen3 has a default of its own"
    assert parse_config(QWEN3 | {"head_dim": None}).head_dim == 128


def test_both_rotary_layouts_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    old = parse_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | scaling})
    older = parse_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | scaling})
    new = parse_config(LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | scaling})
    assert old.rope == older.rope == new.rope
    assert old.rope.theta == 5e5
    assert dict(old.rope.parameters)["original_max_position_embeddings"] == 512.0


def test_a_null_scaling_means_none() -> None:
    assert parse_config(LLAMA | {"rope_scaling": None, "rope_theta": 7.0}).rope == RopeConfig(7.0)


def test_the_original_length_defaults_to_the_models() -> None:
    rope = parse_config(LLAMA | {"rope_scaling": {"type": "yarn", "factor": 2.0}}).rope
    assert dict(rope.parameters)["original_max_position_embeddings"] == 4096.0


@pytest.mark.parametrize(
    ("source", "window", "layers"),
    [
        (MISTRAL | {"sliding_window": 100}, 100, ()),
        (MISTRAL | {"sliding_window": None}, None, ()),
        (LLAMA | {"sliding_window": 100}, None, ()),
        (QWEN2 | {"sliding_window": 100}, None, ()),
        (QWEN2 | {"sliding_window": 100, "use_sliding_window": True}, None, ()),
        (
            QWEN2 | {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3},
            100,
            (False, False, False, True),
        ),
        (
            QWEN3
            | {
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            9,
            (False, True, False, True),
        ),
    ],
)
def test_sliding_windows(source: dict[str, Any], window: int | None, layers: tuple[bool, ...]) -> None:
    config = parse_config(source)
    assert (config.sliding_window, config.sliding_layers) == (window, layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not supported.*LlamaForCausalLM.*Qwen3"),
        ({"architectures": None, "model_type": "mamba"}, "mamba is not supported"),
        ({"architectures": [], "model_type": None}, "not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised safetensors"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "ntk-by-magic", "factor": 2.0}}, "'ntk-by-magic' is not supported.*llama3"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor is 'two'"),
        ({"rope_scaling": [1]}, "not an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"hidden_size": 66}, "head_dim is None"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"]},
            "one known kind for each of 4 layers",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(LLAMA | changes)


def test_sizes_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ModelError, match="4 query heads cannot share 3"):
        check_config(parse_config(LLAMA | {"num_key_value_heads": 3}))
    with pytest.raises(ModelError, match="head_dim is 15"):
        check_config(parse_config(LLAMA | {"head_dim": 15}))


def shapes_of(source: dict[str, Any]) -> tuple[NativeModelConfig, dict[str, tuple[int, ...]]]:
    config = parse_config(source)
    return config, expected_shapes(config)


def test_the_expected_tensors_follow_the_configuration() -> None:
    _, untied = shapes_of(LLAMA)
    _, tied = shapes_of(LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 2})
    assert untied["lm_head.weight"] == (1000, 64)
    assert "lm_head.weight" not in tied
    assert tied["model.layers.3.self_attn.k_proj.weight"] == (32, 64)
    assert shapes_of(QWEN2)[1]["model.layers.0.self_attn.v_proj.bias"] == (64,)
    assert shapes_of(QWEN3)[1]["model.layers.0.self_attn.q_norm.weight"] == (128,)


def test_a_missing_or_misshapen_tensor_is_named() -> None:
    config, shapes = shapes_of(LLAMA)
    check_shapes(config, shapes)
    with pytest.raises(ModelError, match=r"lack the tensor model\.norm\.weight"):
        check_shapes(config, {name: shape for name, shape in shapes.items() if name != "model.norm.weight"})
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \[64, 1000\].*\[1000, 64\]"):
        check_shapes(config, shapes | {"lm_head.weight": (64, 1000)})
