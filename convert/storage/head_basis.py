"""Coordinates of each head's un-rotated queries and keys in which rounding weights costs least.

For any invertible T the queries T⁻ᵀ q and the keys T k have the same scores. A fold starts from the source's
coordinates. Some of them are nearly without keys: those of fast rotary pairs, which slots serve. Their
queries are as large as the others. llama.cpp stores the keys' up-projection transposed, so that one scale
serves numbers of 32 coordinates of a head. Then a coordinate without keys gets an error as large as its
neighbours' numbers, and its query multiplies it.

Legend: attention.py.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..algebra.attention import LatentAttention, NormedLatentAttention
from ..algebra.balance import balanced
from ..algebra.forward import query_input

_LEAST = 1e-4  # part of a direction, of the mean part, that numbers of tokens and weights are taken to have


def with_balanced_heads(layer: LatentAttention, input_BTD: Tensor) -> LatentAttention:
    """Return the same function with un-rotated keys and queries of every head in balanced coordinates.

    Both the numbers of tokens and the numbers of weights count. The queries' root mean square stays. The
    layer has `level_CC`, float64, and reads the inputs.
    """
    assert layer.level_CC is not None
    heads, width = layer.q_nope_NPA.shape[:2]
    if isinstance(layer, NormedLatentAttention) or not width:
        return layer  # the former's queries are not written
    rows_NPC = layer.k_up_NPC @ torch.linalg.inv(layer.level_CC)
    query_NPP, key_NPP = (rows.new_zeros(heads, width, width) for rows in (layer.q_nope_NPA, rows_NPC))
    for each_TD in input_BTD:
        input_TD = each_TD.to(rows_NPC)
        latent_TC = torch.nn.functional.normalize(input_TD @ layer.down_CD.mT @ layer.level_CC.mT, dim=-1)
        key_NPT = rows_NPC @ latent_TC.mT
        key_NPP += key_NPT @ key_NPT.mT
        query_NPT = layer.q_nope_NPA @ query_input(layer, input_TD[None])[0].mT
        if layer.q_nope_NP is not None:
            query_NPT = query_NPT + layer.q_nope_NP[..., None]
        query_NPP += query_NPT @ query_NPT.mT
    # A GPU takes longer than a CPU for decompositions that are as small as a head.
    basis_NPP = torch.stack(
        [
            balanced(_shares(*keys).cpu(), _shares(*queries).cpu())
            for keys, queries in zip(
                zip(key_NPP, rows_NPC, strict=True),
                zip(query_NPP, layer.q_nope_NPA, strict=True),
                strict=True,
            )
        ]
    ).to(rows_NPC)
    back_NPP = torch.linalg.inv(basis_NPP).mT
    q_nope_NPA = back_NPP @ layer.q_nope_NPA
    size = (layer.q_nope_NPA.square().mean((1, 2)) / q_nope_NPA.square().mean((1, 2))).sqrt()
    size_N11 = torch.where(size.isfinite(), size, 1.0)[:, None, None]
    back_NPP, basis_NPP = back_NPP * size_N11, basis_NPP / size_N11
    bias_NP = layer.q_nope_NP
    return replace(
        layer,
        q_nope_NPA=back_NPP @ layer.q_nope_NPA,
        q_nope_NP=None if bias_NP is None else (back_NPP @ bias_NP[..., None])[..., 0],
        k_up_NPC=basis_NPP @ layer.k_up_NPC,
    )


def _shares(moment_PP: Tensor, rows_PA: Tensor) -> Tensor:
    """Return the sum of both second moments, of tokens and of weights, each of trace 1, floored."""
    total_PP = torch.eye(len(moment_PP)).to(moment_PP) * (_LEAST / len(moment_PP))
    for each_PP in (moment_PP, rows_PA @ rows_PA.mT):
        trace = each_PP.trace()
        total_PP += each_PP / trace if trace > 0 else each_PP
    return total_PP
