"""Rotary tables: cos and sin by position, in the rotate-half convention, numerically those of transformers.

A table depends on the configuration and its own length alone, never on what else is in a batch, so results are
batch-invariant. Two kinds of scaling depend on the sequence length in transformers: `dynamic` (the base grows with the
length) and `longrope` (other divisors beyond the original length). There the cache would hold keys rotated by several
bases, and a result would depend on how a prompt was cut. Here `length` (the longest context served) decides once:

- length within the original one: exactly transformers, whatever the prompt;
- length beyond it: at every position the frequencies transformers uses for a sequence of `length` tokens. Short
  prompts then differ a little from transformers; serve with a shorter length to avoid it.
"""

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.engines.native.base import NativeModelConfig, RopeConfig
from headwater.errors import ModelError

_Float: Final = torch.float32


def rope_tables(config: NativeModelConfig, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, float32 [length, head_dim], the attention scaling of yarn and longrope included."""
    frequencies, scaling = _frequencies(config, length)
    angles = torch.arange(length, dtype=_Float)[:, None] * frequencies[None, :]
    doubled = torch.cat((angles, angles), dim=-1)
    return (doubled.cos() * scaling).numpy(), (doubled.sin() * scaling).numpy()


def _frequencies(config: NativeModelConfig, length: int) -> tuple[torch.Tensor, float]:
    """Radians per position for each pair of dimensions, and what cos and sin are multiplied by."""
    rope, dim = config.rope, config.head_dim
    parameters = _Parameters(rope)
    plain = 1.0 / _powers(rope.theta, dim)
    match rope.kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / parameters.number("factor"), 1.0
        case "divisors":
            return plain / parameters.vector("divisors", dim // 2), 1.0
        case "dynamic":
            return 1.0 / _powers(_dynamic_theta(config, parameters.number("factor"), length), dim), 1.0
        case "llama3":
            return _llama3(plain, parameters), 1.0
        case "yarn":
            return _yarn(config, parameters)
        case "longrope":
            return _longrope(config, parameters, length)
        case _:
            raise ModelError(f"rope scaling {rope.kind!r} is not supported")


class _Parameters:
    def __init__(self, rope: RopeConfig) -> None:
        self._values = dict(rope.parameters)

    def optional(self, name: str) -> float | None:
        value = self._values.get(name)
        return value if isinstance(value, float) else None

    def number(self, name: str) -> float:
        value = self.optional(name)
        if value is None:
            raise ModelError(f"the rotary settings lack {name}")
        return value

    def vector(self, name: str, size: int) -> torch.Tensor:
        value = self._values.get(name)
        if not isinstance(value, tuple) or len(value) != size:
            raise ModelError(f"the rotary settings need {size} values of {name}")
        return torch.tensor(value, dtype=_Float)


def _powers(theta: float, dim: int) -> torch.Tensor:
    return torch.pow(theta, torch.arange(0, dim, 2, dtype=_Float) / dim)


def _dynamic_theta(config: NativeModelConfig, factor: float, length: int) -> float:
    stretch = max(length, config.max_position_embeddings) / config.max_position_embeddings
    return config.rope.theta * math.pow(factor * stretch - (factor - 1), config.head_dim / (config.head_dim - 2))


def _llama3(plain: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
    factor, original = parameters.number("factor"), parameters.number("original_max_position_embeddings")
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    wavelengths = 2 * math.pi / plain
    kept = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    blended = (1 - kept) * plain / factor + kept * plain
    scaled = torch.where(wavelengths > original / low, plain / factor, blended)
    return torch.where(wavelengths < original / high, plain, scaled)


def _yarn(config: NativeModelConfig, parameters: _Parameters) -> tuple[torch.Tensor, float]:
    dim, theta = config.head_dim, config.rope.theta
    original = parameters.number("original_max_position_embeddings")
    factor = parameters.optional("factor") or config.max_position_embeddings / original
    low = _yarn_dimension(parameters.optional("beta_fast") or 32.0, dim, theta, original)
    high = _yarn_dimension(parameters.optional("beta_slow") or 1.0, dim, theta, original)
    if parameters.optional("truncate") != 0.0:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=_Float) - low) / ((high - low) or 0.001)).clamp(0, 1)
    powers = _powers(theta, dim)
    kept = 1 - ramp
    return (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept, _yarn_scaling(parameters, factor)


def _yarn_dimension(rotations: float, dim: int, theta: float, original: float) -> float:
    """The dimension whose wave turns `rotations` times over the original length."""
    return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))


def _yarn_scaling(parameters: _Parameters, factor: float) -> float:
    given = parameters.optional("attention_factor")
    if given is not None:
        return given
    mscale, over_all = parameters.optional("mscale"), parameters.optional("mscale_all_dim")
    if mscale and over_all:
        return _mscale(factor, mscale) / _mscale(factor, over_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(config: NativeModelConfig, parameters: _Parameters, length: int) -> tuple[torch.Tensor, float]:
    original = parameters.number("original_max_position_embeddings")
    factor = parameters.optional("factor") or config.max_position_embeddings / original
    scaling = parameters.optional("attention_factor")
    if scaling is None:
        scaling = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    divisors = parameters.vector("long_factor" if length > original else "short_factor", config.head_dim // 2)
    return 1.0 / (divisors * _powers(config.rope.theta, config.head_dim)), scaling
