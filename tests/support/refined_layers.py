"""Layers and samples of their inputs that refinement is tested on."""

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.algebra.attention import Attention
from kvfold.convert.algebra.forward import attend
from kvfold.convert.methods.refinement import LayerSample

from .layers import FREQUENCIES_F, D, layer, turned_copies


def normed(sequences: int, length: int, seed: int = 0, dims: int = D) -> Tensor:
    """Draw inputs of unit mean square, most of which varies along `dims` directions."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(sequences, length, D, generator=random, dtype=torch.float64)
    x = x @ torch.diag(torch.where(torch.arange(D) < dims, 1.0, 0.1).double())
    return x / x.square().mean(-1, keepdim=True).sqrt()


def scattered() -> tuple[Attention, list[int]]:
    """Return four heads, of which the outer two and the inner two are turned copies of each other."""
    one, other = turned_copies(layer(seed=1), seed=2), turned_copies(layer(seed=3), seed=4)
    a = layer()
    k_KHD = torch.stack([one.k_KHD[0], other.k_KHD[0], other.k_KHD[1], one.k_KHD[1]])
    v_KHD = torch.stack([one.v_KHD[0], other.v_KHD[0], other.v_KHD[1], one.v_KHD[1]])
    return replace(a, k_KHD=k_KHD, v_KHD=v_KHD), [0, 3, 1, 2]


def teacher() -> Attention:
    """Return heads that are turned copies of each other, plus noise."""
    copies, noise = turned_copies(layer(), seed=4), layer(seed=5)
    return replace(copies, k_KHD=copies.k_KHD + 0.2 * noise.k_KHD, v_KHD=copies.v_KHD + 0.2 * noise.v_KHD)


def sample(x_BTD: Tensor) -> LayerSample:
    root_DD = torch.randn(D, D, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return LayerSample(
        input_BTD=x_BTD,
        output_BTD=attend(teacher(), x_BTD[:1], FREQUENCIES_F),
        fisher_DD=root_DD @ root_DD.mT / D,
    )
