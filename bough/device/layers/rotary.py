"""Rotary position embedding (Su et al. 2021) and its context extensions, as one table per model.

A model's positions are looked up in a table [n_positions, R] float32: R/2 cosines, then R/2 sines, with the
attention factor of the scaling already multiplied in. The numbers are those of ``transformers``, operation
by operation in float32, for the types default, linear, dynamic, llama3, yarn and longrope; ``factors`` are given one by
one.

*dynamic* (NTK-aware scaling by length): ``transformers`` recomputes the frequencies from the length of the
sequence so far, so what a key looks like depends on when it was computed. Cached keys are shared between
sequences here, hence every position must have one value: position p gets the frequencies of a sequence of
p + 1 tokens. That equals ``transformers`` for every sequence within the original maximum, and, beyond it, for
tokens that are generated one at a time; it differs where ``transformers`` takes a prompt longer than the
original maximum in one piece and rotates all of it by the prompt's full length.

*longrope*: ``transformers`` takes one set of factors for sequences within the original maximum and another for longer
ones, and when a sequence passes it, computes all of its keys anew. Here the context that is served decides for all
sequences, so that their keys can be shared and no token waits for that: within the original maximum all are short ones,
beyond it long ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from bough.base.errors import ConfigError

Tensor = torch.Tensor

DEFAULT_THETA = 10000.0


def rope_parameters(config: Mapping[str, Any], kind: str | None = None) -> dict[str, Any]:
    """The rotary settings of a Hugging Face config: a dict with at least ``rope_type`` and ``rope_theta``.

    Reads ``rope_parameters`` (transformers 5) or ``rope_scaling`` and ``rope_theta`` (before), with the type under
    ``rope_type`` or ``type``, and fills in ``original_max_position_embeddings`` as transformers does. ``kind`` is that
    of the layer ("full_attention", "sliding_attention"), for models in which they differ.
    """
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in settings.values()):
        if not isinstance(settings.get(kind), Mapping):
            raise ConfigError("rotary settings that differ between layers are not supported for this model")
        settings = dict(settings[kind])
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    settings.setdefault("rope_theta", config.get("rope_theta") or DEFAULT_THETA)
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    settings["partial_rotary_factor"] = 1.0 if partial is None else partial
    original = config.get("original_max_position_embeddings")
    if original is not None:
        settings["original_max_position_embeddings"] = original
    settings.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    settings["max_position_embeddings"] = config.get("max_position_embeddings")
    return settings


def rotary_table(settings: Mapping[str, Any], head_dim: int, n_positions: int) -> Tensor:
    """[n_positions, R] float32: cosines in the first half of a row, sines in the second.

    R is ``head_dim`` or the part of it that is rotated. ``settings`` comes from :func:`rope_parameters`; ConfigError
    for an unknown type or a missing number.
    """
    kind, share = settings["rope_type"], settings["partial_rotary_factor"]
    if not isinstance(share, int | float) or not 0 < share <= 1 or int(head_dim * share) % 2:
        raise ConfigError(f"partial_rotary_factor {share!r} does not fit heads of {head_dim}")
    head_dim = int(head_dim * share)
    positions = torch.arange(n_positions, dtype=torch.float32)
    factor = 1.0
    try:
        if kind == "dynamic":
            angles = positions[:, None] * _dynamic(settings, head_dim, n_positions)
        elif kind == "yarn":
            frequencies, factor = _yarn(settings, head_dim)
            angles = torch.outer(positions, frequencies)
        elif kind in ("longrope", "su"):
            frequencies, factor = _longrope(settings, head_dim, n_positions)
            angles = torch.outer(positions, frequencies)
        elif kind in _FREQUENCIES:
            angles = torch.outer(positions, _FREQUENCIES[kind](settings, head_dim))
        else:
            known = ", ".join([*_FREQUENCIES, "dynamic", "yarn", "longrope"])
            raise ConfigError(f"unknown rotary type {kind!r}; known: {known}")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"the settings of rotary type {kind!r} are not usable: {error!r}") from error
    table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
    if not table.isfinite().all():
        raise ConfigError(f"the settings of rotary type {kind!r} give frequencies that are not finite")
    return table


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _default(settings: Mapping[str, Any], dim: int) -> Tensor:
    frequencies: Tensor = 1.0 / (settings["rope_theta"] ** _exponents(dim))
    return frequencies


def _linear(settings: Mapping[str, Any], dim: int) -> Tensor:
    frequencies: Tensor = _default(settings, dim) / settings["factor"]
    return frequencies


def _llama3(settings: Mapping[str, Any], dim: int) -> Tensor:
    """Llama 3.1: long waves are slowed by ``factor``, short ones kept, those between interpolated."""
    factor, low, high = settings["factor"], settings["low_freq_factor"], settings["high_freq_factor"]
    original = settings["original_max_position_embeddings"]
    frequencies = _default(settings, dim)
    wavelength = 2 * math.pi / frequencies
    slowed = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * slowed / factor + smooth * slowed
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, between, slowed)


def _factors(settings: Mapping[str, Any], dim: int) -> Tensor:
    """A divisor for each frequency, as GGUF files of Llama 3.1 and later carry them."""
    factors = torch.tensor(settings["factors"], dtype=torch.float32)
    if factors.shape != (dim // 2,):
        raise ConfigError(f"{len(factors)} rotary factors do not fit {dim // 2} frequencies")
    return _default(settings, dim) / factors


def _dynamic(settings: Mapping[str, Any], dim: int, n_positions: int) -> Tensor:
    """[n_positions, dim / 2]: the frequencies of each position; see the module's text."""
    factor, most = settings["factor"], settings["max_position_embeddings"]
    # In float64, so that within the original maximum the base is rope_theta to the last bit.
    length = torch.arange(1, n_positions + 1, dtype=torch.float64).clamp(min=most)
    base = settings["rope_theta"] * ((factor * length / most) - (factor - 1)) ** (dim / (dim - 2))
    frequencies: Tensor = 1.0 / (base.float()[:, None] ** _exponents(dim))
    return frequencies


def _yarn(settings: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): frequencies, and the factor of cosines and sines."""
    theta, original = settings["rope_theta"], settings["original_max_position_embeddings"]
    factor = settings.get("factor") or settings["max_position_embeddings"] / original

    def boundary(rotations: float) -> float:
        """The dimension that turns ``rotations`` times over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = boundary(settings.get("beta_fast") or 32), boundary(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    waves = theta ** _exponents(dim)
    frequencies: Tensor = 1.0 / (factor * waves) * (1 - keep) + 1.0 / waves * keep
    return frequencies, _yarn_attention_factor(settings, factor)


def _longrope(settings: Mapping[str, Any], dim: int, n_positions: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): frequencies, and the factor of cosines and sines."""
    original = settings["original_max_position_embeddings"]
    # The last position is one that overlap may compute too many.
    chosen = settings["long_factor" if n_positions - 1 > original else "short_factor"]
    frequencies = _factors({**settings, "factors": chosen}, dim)
    factor = settings.get("factor") or settings["max_position_embeddings"] / original
    given = settings.get("attention_factor")
    if given is not None:
        return frequencies, float(given)
    return frequencies, math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    given = settings.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, weight_all = settings.get("mscale"), settings.get("mscale_all_dim")
    if weight and weight_all:
        return mscale(weight) / mscale(weight_all)
    return mscale(1.0)


_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "factors": _factors}
