# Copyright 2026 The kvfold authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Attention of a few new tokens to a cache of latents that stay unexpanded; shipped next to the weights.

Up-projections move from the many cached tokens to the few new ones ("weight absorption", arXiv 2405.04434,
section 2.1.2): q·(k_up c) = (k_up^T q)·c, and a sum of values v_up c is v_up times the sum of latents. All
heads then read one latent head, as rows of one matrix product per sequence. The cache is read once for scores
and once for sums, and nothing of its length is copied. Where keys are rotated after they are rebuilt, this
holds for values only, and keys are rebuilt for a block of tokens at a time.

These are plain products of torch, on any device; on a GPU one kernel reads the cache once for both
(kernels_kvfold.py).

Legend: attention_kvfold.py; s tokens of a block, M rows that share a matrix, E and W its columns before and
after.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from .kernels_kvfold import latent_sums, takes
from .layers_kvfold import rotate, softmax, turns

# Elements of keys rebuilt at once: 4 MB in float32, which a core's cache holds (benchmarks/decode.py).
BLOCK = 2**20
GPU_BLOCK = 2**25  # the same on a GPU, where a block is some ten kernels and has to keep all processors busy


def is_plain(up: nn.Linear) -> bool:
    """Return whether an up-projection's weight and bias alone give what a call of the module computes.

    Quantisers, adapters and sharding replace the module's class, its weight's class (torchao, DTensor) or its
    call (compressed-tensors), or add hooks. Some keep weights of one byte apart from their scale, and
    accelerate keeps offloaded weights elsewhere until the module is called. Such modules must be called.
    """
    if type(up) is not nn.Linear or up._forward_hooks or up._forward_pre_hooks:
        return False
    # This hook of accelerate only moves inputs and weights between devices, and keeps the call that it wraps.
    is_moved = type(getattr(up, "_hf_hook", None)).__name__ == "AlignDevicesHook"
    call: Any = up._old_forward if is_moved else up.forward
    if getattr(call, "__func__", None) is not nn.Linear.forward:
        return False
    return all(
        type(numbers) in (nn.Parameter, Tensor, FakeTensor)  # what torch.export traces with, last
        and numbers.is_floating_point()
        and numbers.itemsize > 1
        and not numbers.is_meta
        for numbers in (up.weight, up.bias)
        if numbers is not None
    )


def tells(mask: Any, length: int) -> bool:
    """Return whether a mask of transformers alone determines which tokens see which.

    None, or a mask of padding only, does so for one token.
    """
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return length == 1
    return isinstance(mask, BlockMask) or (isinstance(mask, Tensor) and mask.ndim == 4)


def dense(mask: Any, query: Tensor, seen: int) -> Tensor | None:
    """Return a mask that `tells` in the form that `softmax` takes.

    It is of new tokens `query` (B, N, T, ...) and `seen` cached ones.
    """
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, len(query), 1, query.shape[-2], seen, device=query.device)
    elif mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :].bool()
    given: Tensor | None = mask
    return given


def absorbing_is_less(length: int, seen: int, *, nope: int, rope: int, value: int, rank: int) -> bool:
    """Return whether T new tokens of S are cheaper in the latent than expanded.

    That is fewer multiplications, and no more memory for scores. At 512+64 with heads of 128 it holds up to
    170 new tokens. On a CPU the latent is measured to be faster there still, because expanding also copies.
    Fused kernels for expanded heads narrow that elsewhere. A first call, with nothing cached, is expanded.
    """
    absorbed = length * (rank * (nope + value) + seen * (2 * rank + rope))
    expanded = seen * (rank * (nope + value) + length * (nope + rope + value))
    return length < seen and length <= nope + rope + value and absorbed < expanded


def rebuilding_is_less(
    length: int, seen: int, *, heads: int, groups: int, head: int, value: int, rank: int
) -> bool:
    """Return the same for all heads where keys must be rebuilt and only values may be absorbed."""
    absorbed = length * heads * (rank * value + seen * rank)
    expanded = seen * (groups * value * rank + length * heads * value)
    return length < seen and length * heads <= groups * (head + value) and absorbed < expanded


def attend(
    query_BNTQ: Tensor,
    latent_B1SC: Tensor,
    rope_B1SR: Tensor,
    up_NEC: Tensor,
    mask: Any,
    scale: float,
    module: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with a rotary key that heads share.

    Args:
        query_BNTQ: queries, P un-rotated columns and R rotated ones.
        latent_B1SC: cached latents.
        rope_B1SR: cached rotary keys.
        up_NEC: the up-projections of each head, P rows for keys and V for values.
        mask: one that `tells`.
        scale: factor on scores.
        module: has `softcap` and `sinks`, or None there, and a `config`.

    Returns:
        Outputs (B, N, T, V) and weights (B, N, T, S), or None where a kernel does not form them.
    """
    nope = query_BNTQ.shape[-1] - rope_B1SR.shape[-1]
    nope_BNTP, turned_BNTR = query_BNTQ.tensor_split([nope], dim=-1)
    k_up_NPC, v_up_NVC = up_NEC.tensor_split([nope], dim=1)
    absorbed_BNTC = _by_head(nope_BNTP, k_up_NPC)
    if takes(absorbed_BNTC, turned_BNTR, latent_B1SC, rope_B1SR, module):
        seen = dense(mask, query_BNTQ, latent_B1SC.shape[-2])
        sums_BNTC = latent_sums(
            absorbed_BNTC, turned_BNTR, latent_B1SC.squeeze(1), rope_B1SR.squeeze(1), seen, scale
        )
        return _by_head(sums_BNTC, v_up_NVC.mT), None
    # Scaled before the products: scores in float16 would reach its largest number sooner.
    absorbed_BMC, turned_BMR = (rows_BNTE.flatten(1, 2) * scale for rows_BNTE in (absorbed_BNTC, turned_BNTR))
    scores_BMS = torch.bmm(absorbed_BMC, latent_B1SC.squeeze(1).mT)
    scores_BMS = torch.baddbmm(scores_BMS, turned_BMR, rope_B1SR.squeeze(1).mT)
    scores_BNTS = scores_BMS.view(*query_BNTQ.shape[:3], -1)
    weights_BNTS = softmax(scores_BNTS, dense(mask, query_BNTQ, scores_BNTS.shape[-1]), module)
    return _by_head(_sums(weights_BNTS, latent_B1SC), v_up_NVC.mT), weights_BNTS


def attend_rotated(
    query_BNTH: Tensor, latent_B1SC: Tensor, position_BS: Tensor, frequencies_F: Tensor, up: nn.Linear,
    value: int,
    mask: Any, scale: float, module: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend with keys that are rotated after they are rebuilt; the result is as in `attend`.

    Args:
        query_BNTH: rotated queries.
        latent_B1SC: cached latents.
        position_BS: their positions.
        frequencies_F: of a head's pairs.
        up: the up-projection: for each of K key heads H rows for keys and V for values, with a bias or not.
        value: V.
        mask: as in `attend`, and so are the following.
        scale: factor on scores.
        module: the attention module.
    """
    batch, heads, length, width = query_BNTH.shape
    up_KEC = up.weight.unflatten(0, (-1, width + value))
    groups = len(up_KEC)
    key_up_EC = up_KEC[:, :width].flatten(0, 1)
    biases_KE = None if up.bias is None else up.bias.view(groups, -1)
    key_bias_E = None if biases_KE is None else biases_KE[:, :width].flatten()
    grouped_BKMH = query_BNTH.reshape(batch, groups, -1, width) * scale
    elements = BLOCK if latent_B1SC.device.type == "cpu" else GPU_BLOCK
    block, scores = max(16, elements // (batch * len(key_up_EC))), []
    for latent_BsC, position_Bs in zip(
        latent_B1SC.squeeze(1).split(block, 1), position_BS.split(block, 1), strict=True
    ):
        key_BKsH = (
            nn.functional.linear(latent_BsC, key_up_EC, key_bias_E)
            .unflatten(-1, (groups, width))
            .transpose(1, 2)
        )
        key_BKsH = rotate(key_BKsH, *turns(position_Bs, frequencies_F, key_BKsH.dtype), False)
        scores.append(grouped_BKMH @ key_BKsH.mT)
    scores_BNTS = torch.cat(scores, dim=-1).view(batch, heads, length, -1)
    weights_BNTS = softmax(scores_BNTS, dense(mask, query_BNTH, scores_BNTS.shape[-1]), module)
    summed_BKMC = _sums(weights_BNTS, latent_B1SC).reshape(batch, groups, -1, latent_B1SC.shape[-1])
    output_BNTV = _by_head(summed_BKMC, up_KEC[:, width:].mT).reshape(batch, heads, length, value)
    if biases_KE is not None:
        bias_NV = biases_KE[:, width:].repeat_interleave(heads // groups, dim=0)
        output_BNTV = (
            output_BNTV + weights_BNTS.sum(-1, keepdim=True) * bias_NV[:, None]
        )  # with sinks the sum is not 1
    return output_BNTV, weights_BNTS


def _by_head(rows_BNTE: Tensor, matrix_NEW: Tensor) -> Tensor:
    """Each head's rows times its matrix.

    A product a head, whatever the batch: broadcasting would copy matrices.
    """
    rows_NME = rows_BNTE.transpose(0, 1).flatten(1, 2)
    # The weights as they lie in memory: of a transposed matrix in bfloat16 the CPU's product makes a copy
    # first.
    stored = matrix_NEW.stride(-1) == 1
    products_NMW = torch.bmm(rows_NME, matrix_NEW) if stored else torch.bmm(matrix_NEW.mT, rows_NME.mT).mT
    products_BNTW: Tensor = products_NMW.unflatten(1, (len(rows_BNTE), -1)).transpose(0, 1)
    return products_BNTW


def _sums(weights_BNTS: Tensor, latent_B1SC: Tensor) -> Tensor:
    """Compute the weighted sums (B, N, T, C) of latents.

    There is one product per sequence: broadcasting would copy latents for each head.
    """
    sums_BNTC: Tensor = torch.bmm(weights_BNTS.flatten(1, 2), latent_B1SC.squeeze(1)).unflatten(
        1, weights_BNTS.shape[1:3]
    )
    return sums_BNTC
