"""Rotary embeddings as complex numbers: position m turns a pair, one complex coordinate, by e^(i f m).

Legend: F rotary pairs of a head, H = 2F head dim, D columns; a row pair (real, imaginary) is one complex row.
Layouts: `half` keeps the real parts first, then the imaginary ones (Llama); `interleaved` alternates them
(DeepSeek).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.errors import InvalidInput


def stated_rope(config: Mapping[str, Any]) -> Any:
    """Return the object of a config.json, or of a complete one, that says how layers rotate.

    It is `rope_scaling` where there is one: transformers then passes over `rope_parameters`, be they stated
    or its class's own.
    """
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary part of a config.json, always with `rope_type` and `rope_theta`.

    It is `rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` of transformers 4.
    """
    scaling = stated_rope(config)
    if not isinstance(scaling, dict):
        raise InvalidInput(f"config.json has rope parameters {scaling!r}, where an object is needed")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    if not isinstance(kind, str) or not isinstance(theta, int | float):
        raise InvalidInput(
            f"config.json has rope_type {kind!r} and rope_theta {theta!r}, where a string and a number are "
            "needed"
        )
    return {
        **{key: value for key, value in scaling.items() if key != "type"},
        "rope_type": kind,
        "rope_theta": float(theta),
    }


def frequencies(rope: dict[str, Any], width: int, positions: int) -> tuple[Tensor, float]:
    """Return the angular frequencies of a rotary part, and the factor that its cosines and sines carry.

    Args:
        rope: from `rope_parameters`.
        width: rotary dimensions, twice the number of pairs.
        positions: max_position_embeddings, which YaRN falls back on.

    Returns:
        Frequencies (width / 2,) in float64, radians per token, fastest first; the attention factor.

    Raises:
        InvalidInput: a rope_type whose frequencies depend on the length of the input, or an unknown one.
    """
    kind = rope["rope_type"]
    if kind not in _TABLES:
        raise InvalidInput(
            f"rope_type {kind} has no fixed frequency table, which MLA's shared rotary key needs; these have "
            f"one: {', '.join(sorted(_TABLES))} (--to gqa works with any)"
        )
    # In float32 first, as transformers does: at far positions the rounding of a frequency is what one sees of
    # it.
    base = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width))
    try:
        frequencies_F, factor = _TABLES[kind](base.double(), rope, positions)
    except KeyError as missing:
        raise InvalidInput(f"rope_type {kind} needs {missing} in config.json's rope parameters") from None
    except (TypeError, ValueError, ZeroDivisionError):
        raise InvalidInput(f"config.json has rope parameters that make no frequencies: {rope}") from None
    rounded_F = frequencies_F.float().double()
    if not (rounded_F.isfinite().all() and math.isfinite(factor)):
        raise InvalidInput(f"config.json has rope parameters that make infinite frequencies: {rope}")
    return rounded_F, factor


def longrope_factor(rope: dict[str, Any], positions: int) -> float:
    """Return the factor on cosines and sines of longrope (arXiv 2402.13753), as transformers computes it.

    It is 1 for other types.
    """
    if rope["rope_type"] != "longrope":
        return 1.0
    try:
        length = float(rope["original_max_position_embeddings"] or positions)
        growth = rope.get("factor") or positions / length
        stated = rope.get("attention_factor")
        if stated is not None:
            return float(stated)
        return math.sqrt(1 + math.log(growth) / math.log(length)) if growth > 1 else 1.0
    except (TypeError, ValueError, ZeroDivisionError):
        raise InvalidInput(f"config.json has rope parameters that make no attention factor: {rope}") from None


def _llama3(base_F: Tensor, rope: dict[str, Any], positions: int) -> tuple[Tensor, float]:
    """Compute Llama 3.1's table: slow frequencies are divided by `factor`, fast ones are kept.

    Those between are a linear blend.
    """
    turns_F = rope["original_max_position_embeddings"] * base_F / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep_F = ((turns_F - low) / (high - low)).clamp(0, 1)
    return base_F * (keep_F + (1 - keep_F) / rope["factor"]), 1.0


def _yarn(base_F: Tensor, rope: dict[str, Any], positions: int) -> tuple[Tensor, float]:
    """Compute YaRN's table (arXiv 2309.00071), as transformers does."""
    original = rope.get("original_max_position_embeddings") or positions
    factor = rope["factor"]
    width = 2 * len(base_F)
    theta = rope["rope_theta"]

    def dimension(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(rope.get("beta_fast") or 32)
    high = dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp_F = ((torch.arange(len(base_F), dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    gain = rope.get("attention_factor")
    if gain is None:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        if mscale and all_dim:
            gain = _mscale(factor, mscale) / _mscale(factor, all_dim)
        else:
            gain = _mscale(factor, 1.0)
    return base_F * ((1 - ramp_F) + ramp_F / factor), float(gain)


def _proportional(base_F: Tensor, rope: dict[str, Any], positions: int) -> tuple[Tensor, float]:
    """Compute Gemma 4's table: the first pairs rotate as in a whole head, the others not at all."""
    kept = int(rope.get("partial_rotary_factor", 1.0) * 2 * len(base_F) // 2)
    table_F = base_F / rope.get("factor", 1.0)
    table_F[kept:] = 0.0
    return table_F, 1.0


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_TABLES: dict[str, Callable[[Tensor, dict[str, Any], int], tuple[Tensor, float]]] = {
    "default": lambda base_F, rope, positions: (base_F, 1.0),
    "linear": lambda base_F, rope, positions: (base_F / rope["factor"], 1.0),
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
FIXED = frozenset(_TABLES)  # rope types whose frequencies do not depend on the input's length


def complex_rows(rows_HD: Tensor) -> Tensor:
    """Return rows in the half layout (..., 2F, D) as complex rows (..., F, D)."""
    real, imaginary = rows_HD.chunk(2, dim=-2)
    return torch.complex(real, imaginary)


def half_rows(rows_FD: Tensor) -> Tensor:
    """Return complex rows (..., F, D) in the half layout (..., 2F, D); the inverse of `complex_rows`."""
    return torch.cat([rows_FD.real, rows_FD.imag], dim=-2)


def interleaved_rows(rows_FD: Tensor) -> Tensor:
    """Return complex rows (..., F, D) in the interleaved layout (..., 2F, D)."""
    return torch.stack([rows_FD.real, rows_FD.imag], dim=-2).flatten(-3, -2)
