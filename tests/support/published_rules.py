"""Statistics, frequency bands and outputs of layers that are folded by a published rule."""

from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from kvfold.convert.algebra.attention import Attention
from kvfold.convert.algebra.metric import with_bias
from kvfold.convert.algebra.rotary import frequencies
from kvfold.convert.algebra.target import LatentTarget
from kvfold.convert.calibration.statistics import LayerStatistics
from kvfold.convert.methods.latent import Band
from kvfold.convert.methods.published import PEERS, Peer, peer, with_few_queries

from . import layers
from .layers import FREQUENCIES_F, D, H, latent_output

PER_HEAD = [name for name, peer in PEERS.items() if peer.per_head]
F = H // 2
DEMO = Path(__file__).parents[2] / "recipes" / "demo"


def statistics_of(a: Attention, x_XD: Tensor) -> LayerStatistics:
    """Compute what the rules read, by definition; the rest is empty, so that no rule can read it unnoticed."""
    x_XE = torch.cat([x_XD, torch.ones_like(x_XD[:, :1])], 1)
    bias = torch.zeros(a.q_NHD.shape[:2], dtype=torch.float64) if a.q_NH is None else a.q_NH
    q_NXH = torch.einsum("nhe,xe->nxh", with_bias(a.q_NHD, bias), x_XE)
    none = torch.zeros(0, dtype=torch.float64)
    empty = dict.fromkeys((field.name for field in fields(LayerStatistics)), none)
    read = {"input_EE": x_XE.mT @ x_XE / len(x_XE), "query_NHH": q_NXH.mT @ q_NXH / len(x_XE)}
    return LayerStatistics(**empty | read)


def tokens(seed: int = 9, count: int = 200) -> Tensor:
    """Draw inputs with a mean and unequal directions: covariance, second moment and identity differ."""
    random = torch.Generator().manual_seed(seed)
    x_XD = torch.randn(count, D, generator=random, dtype=torch.float64)
    return x_XD * torch.linspace(0.1, 2, D, dtype=torch.float64) + 0.3


def bands_of(
    name: str, rope_dim: int, *calibrated: tuple[Attention, LayerStatistics | None]
) -> tuple[Band, ...]:
    stock_S, _ = frequencies({"rope_type": "default", "rope_theta": 100.0}, rope_dim, 64)
    return rule(name).bands(lambda: calibrated, FREQUENCIES_F, stock_S)


def rule(name: str) -> Peer:
    """Return the rule of a name with settings."""
    found = peer(name)
    assert found is not None
    return found


def folded_output(
    name: str,
    a: Attention,
    target: LatentTarget,
    calibration_XD: Tensor,
    x_TD: Tensor,
    seen_XD: Tensor | None = None,
) -> Tensor:
    """Return the folded layer's output; `seen_XD` are a rule's inputs behind layers that were changed."""
    statistics = statistics_of(a, calibration_XD)
    bands = bands_of(name, target.qk_rope_head_dim, (a, statistics))
    slots_S = torch.tensor([band.frequency for band in bands for _ in range(band.slots)], dtype=torch.float64)
    still = 0.0 if layers.FREQUENCIES_F.max() == 0 else 1.0
    input_EE = None if seen_XD is None else statistics_of(a, seen_XD).input_EE
    folded = with_few_queries(rule(name), a, target, bands, statistics, input_EE)
    return latent_output(folded, slots_S * still, x_TD)
