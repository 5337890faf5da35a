"""config.json of a supported family -> `NativeModelConfig`.

Both layouts of the rotary settings are read: `rope_theta` + `rope_scaling`, and `rope_parameters`. What would change
the result and is not implemented (another activation, a partial rotation, quantised weights, per-layer rotations) is
refused by name.
"""

from collections.abc import Mapping
from typing import Final

from headwater.engines.native.base import NativeModelConfig, RopeConfig
from headwater.errors import ModelError

SUPPORTED: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_BY_MODEL_TYPE: Final = dict(zip(("llama", "mistral", "qwen2", "qwen3"), SUPPORTED, strict=True))
_ROPE_KINDS: Final = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_KINDS_WITH_ORIGINAL: Final = ("yarn", "llama3", "longrope")
_REQUIRED_ROPE_KEYS: Final = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
MAX_LAYERS: Final = 4096
MAX_POSITIONS: Final = 1 << 30
MAX_SIZE: Final = 1 << 24


class _Fields:
    """Typed access to config.json; complaints name the field."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def integer(self, name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ModelError(f"config.json: {name} is {value!r}, not a whole number from 1 to {most}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"config.json: {name} is {value!r}, not a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} is {value!r}, not true or false")
        return value


def supported_architecture(config: Mapping[str, object]) -> str:
    """The architecture, by class name or model type. Raises `ModelError` with the list of those supported."""
    named = config.get("architectures")
    candidates = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    by_type = _BY_MODEL_TYPE.get(str(config.get("model_type")), "")
    for candidate in candidates or [by_type]:
        if candidate in SUPPORTED:
            return candidate
    given = ", ".join(candidates) or str(config.get("model_type"))
    raise ModelError(f"architecture {given} is not supported (supported: {', '.join(SUPPORTED)})")


def parse_config(config: Mapping[str, object]) -> NativeModelConfig:
    """Read and check config.json. Raises `ModelError`."""
    architecture = supported_architecture(config)
    _refuse_unimplemented(config)
    fields = _Fields(config)
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = fields.flag("attention_bias")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings", 1 << 11, most=MAX_POSITIONS)
    window, layers = _sliding(config, architecture, num_layers)
    return NativeModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=_head_dim(fields, architecture, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(config, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=qwen2 or attention_bias,
        attention_output_bias=attention_bias and not qwen2,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=window,
        sliding_layers=layers,
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def check_config(config: NativeModelConfig) -> NativeModelConfig:
    """Refuse sizes that do not fit each other."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} KV heads")
    if config.head_dim % 2:
        raise ModelError(f"head_dim is {config.head_dim}, which cannot be rotated: it must be even")
    return config


def _head_dim(fields: _Fields, architecture: str, num_heads: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if architecture == "Qwen3ForCausalLM":
        return fields.integer("head_dim", 128)
    return fields.integer("head_dim", hidden_size // num_heads if hidden_size % num_heads == 0 else None)


def _refuse_unimplemented(config: Mapping[str, object]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"activation {activation!r} is not supported (supported: silu)")
    if config.get("quantization_config"):
        raise ModelError("quantised safetensors are not supported", hint="Take the 16-bit model, or a GGUF file.")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"partial_rotary_factor {config['partial_rotary_factor']} is not supported")


def _sliding(config: Mapping[str, object], architecture: str, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and per layer whether it applies (empty: everywhere)."""
    is_qwen = architecture.startswith("Qwen")
    window = config.get("sliding_window", 4096 if is_qwen or architecture == "MistralForCausalLM" else None)
    if architecture == "LlamaForCausalLM" or window is None or (is_qwen and not config.get("use_sliding_window")):
        return None, ()
    if not isinstance(window, int) or window < 1:
        raise ModelError(f"config.json: sliding_window is {window!r}, not a whole number of at least 1")
    if not is_qwen:
        return window, ()
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
            raise ModelError(f"config.json: layer_types does not name one known kind for each of {layers} layers")
        applies = tuple(kind == "sliding_attention" for kind in kinds)
    else:
        first = _Fields(config).number("max_window_layers", 28)
        applies = tuple(layer >= first for layer in range(layers))
    return (window, applies) if any(applies) else (None, ())


def _rope(config: Mapping[str, object], max_positions: int) -> RopeConfig:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(f"config.json: the rotary settings are {parameters!r}, not an object")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError("rotary settings that differ by layer are not supported")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in _ROPE_KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported (supported: {', '.join(_ROPE_KINDS)})")
    theta = _Fields(parameters).number("rope_theta", _Fields(config).number("rope_theta", 10_000.0))
    values = {key: _rope_value(key, value) for key, value in parameters.items() if _is_rope_value(key, value)}
    if kind in _KINDS_WITH_ORIGINAL:
        values.setdefault("original_max_position_embeddings", float(max_positions))
        outer = config.get("original_max_position_embeddings")
        if isinstance(outer, int):
            values["original_max_position_embeddings"] = float(outer)
    missing = [key for key in _REQUIRED_ROPE_KEYS.get(str(kind), ()) if key not in values]
    if missing:
        raise ModelError(f"rope scaling {kind!r} needs {', '.join(missing)}")
    return RopeConfig(theta, str(kind), tuple(sorted(values.items())))


def _is_rope_value(key: str, value: object) -> bool:
    return key not in {"rope_type", "type", "rope_theta", "partial_rotary_factor"} and value is not None


def _rope_value(key: str, value: object) -> float | tuple[float, ...]:
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, list) and all(isinstance(v, int | float) for v in value):
        return tuple(float(v) for v in value)
    raise ModelError(f"config.json: rotary setting {key} is {value!r}, not a number or a list of numbers")
