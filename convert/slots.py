"""Where the rotary slots of MLA are, and how config.json says so to a stock engine."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .allocate import divide
from .attention import Attention
from .factor import Band, source_bands, uniform_bands
from .families import check_for_latent
from .metric import Metric, from_statistics, weights_only
from .rotary import frequencies, rope_parameters
from .source import Source
from .statistics import Statistics
from .target import MLA, Target


def choose_slots(
    source: Source, target: Target, statistics: Statistics | None, options: Mapping[str, Any]
) -> tuple[Target, tuple[Band, ...], float | None]:
    """The rotary slots of an MLA target, which statistics may divide anew, and the loss predicted with them."""
    if not isinstance(target, MLA):
        return target, (), None
    check_for_latent(source.config)
    if statistics is not None and target.slots == "uniform":
        return _divided(source, target, statistics, options)
    return target, _fixed_bands(source, target), None


def metric_of(statistics: Statistics | None, layer: int, attention: Attention, positions: int) -> Metric:
    """What errors cost in a layer: from statistics where there are any, otherwise from the weights alone."""
    return weights_only(attention, positions) if statistics is None else from_statistics(statistics.layers[layer])


def _divided(
    source: Source, target: MLA, statistics: Statistics, options: Mapping[str, Any]
) -> tuple[MLA, tuple[Band, ...], float]:
    """A target whose slots are allocated by predicted loss, and the rotary width too where the user left both widths open."""
    table_F, factor = source.frequencies()

    def layers() -> Iterator[tuple[Attention, Metric]]:
        for layer in range(source.layers):
            attention = source.attention(layer, factor)
            yield attention, metric_of(statistics, layer, attention, source.positions)

    widths = [target.qk_rope_head_dim]
    if options.get("kv_budget") is not None and options.get("rope_dim") is None:
        # Quarters of a head: finer steps change the predicted loss by less than its own error.
        step = max(2, source.geometry.head_dim // 8 * 2)
        widths = list(range(step, source.geometry.cache_elements // 2 + 1, step))
    elements = target.kv_lora_rank + target.qk_rope_head_dim
    division = divide(layers, table_F, elements, widths)
    rope_dim = elements - division.rank
    return MLA(kv_lora_rank=division.rank, qk_rope_head_dim=rope_dim, slots="allocated"), division.bands, division.predicted


def _fixed_bands(source: Source, target: MLA) -> tuple[Band, ...]:
    """The rotary slots of a target: the source's own kind of table at the target's width, or a slot for every key."""
    table_F, _ = source.frequencies()
    if target.slots == "source":
        return source_bands(table_F, source.geometry.num_key_value_heads)
    uniform_S, _ = frequencies(rope_parameters(source.config), target.qk_rope_head_dim, source.positions)
    return uniform_bands(table_F, uniform_S)


def slot_rope(source: Source, bands: tuple[Band, ...]) -> dict[str, Any]:
    """Rope parameters that put the slots where the bands are.

    A table that is theta^(-2i/R) stays `default`, which every engine knows; any other is written as `longrope` factors
    relative to that table, which transformers takes literally.
    """
    theta = rope_parameters(source.config)["rope_theta"]
    wanted_S = torch.tensor([band.frequency for band in bands for _ in range(band.slots)], dtype=torch.float64)
    default = {"rope_type": "default", "rope_theta": theta}
    stock_S, _ = frequencies(default, 2 * len(wanted_S), source.positions)
    if torch.equal(stock_S, wanted_S):
        return default
    factors = _factors(wanted_S, theta)
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": source.positions,
    }


def _factors(wanted_S: torch.Tensor, theta: float) -> list[float]:
    """longrope factors from which transformers, which computes 1 / (factor · theta^(2i/R)) in float32, gets these frequencies.

    A frequency that is off by one unit in the last place turns a pair by position · 6e-8 of its angle too far.
    """
    width = 2 * len(wanted_S)
    base_S = theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    guess_S = (1 / (wanted_S * base_S.double())).float()
    steps = torch.arange(-4, 5).float()[:, None] * torch.finfo(torch.float32).eps
    candidates = guess_S * (1 + steps)
    off = (1.0 / (candidates * base_S)).double().sub(wanted_S).abs()
    return [float(factor) for factor in candidates.gather(0, off.argmin(0, keepdim=True))[0]]
