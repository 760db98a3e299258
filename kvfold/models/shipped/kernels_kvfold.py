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
"""Attention of a few new tokens to cached latents in one pass, for GPUs; shipped next to the weights.

Plain products read the cache twice, once for scores and once for sums, and write scores between. Here a tile
of latents is read once and serves as keys and as values of all heads (split over the sequence as in
Flash-Decoding, softmax by running maximum as in arXiv 1805.02867). Written in Triton, for any rank up to
1,024 and any rotary width up to 256.

On its first use for a device, dtype and widths the kernel is compared with plain products in float32 on the
tensors at hand; where it does not compile or does not agree, plain products serve from then on, and a warning
says so. It ran on an H200 (Triton 3.6, 2026-11-27). KVFOLD_FUSED=0 in the environment leaves it out.

Legend: attention_kvfold.py; M = N·T rows that read the same cache.
"""

import hashlib
import os
import warnings
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with CUDA builds of torch only
    triton = None

MOST_RANK, MOST_ROPE = 1024, 256
TILES = {
    2: ((64, 3), (64, 2), (32, 2), (16, 1)),
    4: ((32, 1), (16, 1)),
}  # (latents, stages) by bytes of a number, best first
# Relative, of the first use; in float32 TF32 may be on.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-3}
WANTED = os.environ.get("KVFOLD_FUSED", "1") != "0"
_LOG2_E = 1.4426950408889634
_NO_MASK, _KEPT, _ADDED = 0, 1, 2

if triton is not None:

    @triton.jit
    def _masked(scores, mask, where, wanted, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Scores, as powers of 2, under a mask: 1, boolean, or 2, added."""
        given = tl.load(mask + where, mask=wanted, other=0)
        if MASK == 1:
            return tl.where(given != 0, scores, -1e30)
        return scores + tl.maximum(given.to(tl.float32) * 1.4426950408889634, -1e30)

    @triton.jit
    def _split_sums(  # type: ignore[no-untyped-def]
        query, turned, latent, rope, mask, ends, sums, logarithms, rows_M, length_T, seen_S, scale,
        latent_B, latent_S, rope_B, rope_S, mask_B, mask_T, mask_S,
        C: tl.constexpr, C2: tl.constexpr, R: tl.constexpr, R2: tl.constexpr,
        ROWS: tl.constexpr, TILE: tl.constexpr, MASK: tl.constexpr,
    ):  # fmt: skip
        """Of one sequence, ROWS rows and every so many-th tile.

        Weighted means of latents, and log2 of the weights' sum.
        """
        sequence = tl.program_id(2).to(tl.int64)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        there = row < rows_M
        c, r = tl.arange(0, C2), tl.arange(0, R2)
        place = sequence * rows_M + row
        q = tl.load(
            query + place[:, None] * C + c[None, :], mask=there[:, None] & (c < C)[None, :], other=0.0
        )
        if R > 0:
            q_r = tl.load(
                turned + place[:, None] * R + r[None, :], mask=there[:, None] & (r < R)[None, :], other=0.0
            )
        end = seen_S
        if MASK == 1:
            end = tl.load(ends + sequence)
        best = tl.full([ROWS], -1e38, tl.float32)
        total, mean = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, C2], tl.float32)
        for start in range(tl.program_id(1) * TILE, end, tl.num_programs(1) * TILE):
            s = start + tl.arange(0, TILE)
            inside = s < end
            own = latent + sequence * latent_B + s[:, None] * latent_S + c[None, :]
            tile = tl.load(own, mask=inside[:, None] & (c < C)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(tile), input_precision="ieee")
            if R > 0:
                own_r = rope + sequence * rope_B + s[:, None] * rope_S + r[None, :]
                tile_r = tl.load(own_r, mask=inside[:, None] & (r < R)[None, :], other=0.0)
                scores += tl.dot(q_r, tl.trans(tile_r), input_precision="ieee")
            scores = scores * scale
            if MASK > 0:
                where = sequence * mask_B + (row % length_T)[:, None] * mask_T + s[None, :] * mask_S
                scores = _masked(scores, mask, where, there[:, None] & inside[None, :], MASK)
            scores = tl.where(inside[None, :], scores, -1e38)
            peak = tl.maximum(best, tl.max(scores, 1))
            weights, decay = tl.exp2(scores - peak[:, None]), tl.exp2(best - peak)
            total = total * decay + tl.sum(weights, 1)
            mean = mean * decay[:, None] + tl.dot(weights.to(tile.dtype), tile, input_precision="ieee")
            best = peak
        total = tl.where(total > 0, total, 1.0)
        place = (sequence * tl.num_programs(1) + tl.program_id(1)) * rows_M + row
        tl.store(
            sums + place[:, None] * C + c[None, :],
            mean / total[:, None],
            mask=there[:, None] & (c < C)[None, :],
        )
        tl.store(logarithms + place, best + tl.log2(total), mask=there)

    @triton.jit
    def _joined(  # type: ignore[no-untyped-def]
        sums, logarithms, joined, rows_M, splits,
        C: tl.constexpr, PART: tl.constexpr, TOGETHER: tl.constexpr,
    ):  # fmt: skip
        """Average the means of all splits by their weights, for one row and PART columns.

        TOGETHER splits are read at once, since each read is waited for.
        """
        sequence, row = tl.program_id(1).to(tl.int64), tl.program_id(0)
        c, n = tl.program_id(2) * PART + tl.arange(0, PART), tl.arange(0, TOGETHER)
        best, total = tl.full([TOGETHER], -1e38, tl.float32), tl.zeros([TOGETHER], tl.float32)
        mean = tl.zeros([TOGETHER, PART], tl.float32)
        for start in range(0, splits, TOGETHER):
            there = start + n < splits
            place = (sequence * splits + start + n) * rows_M + row
            logarithm = tl.load(logarithms + place, mask=there, other=-1e38)
            own = tl.load(
                sums + place[:, None] * C + c[None, :], mask=there[:, None] & (c < C)[None, :], other=0.0
            )
            peak = tl.maximum(best, logarithm)
            weight, decay = tl.exp2(logarithm - peak), tl.exp2(best - peak)
            mean = mean * decay[:, None] + weight[:, None] * own
            total = total * decay + weight
            best = peak
        weight = tl.exp2(best - tl.max(best, 0))
        whole = tl.sum(mean * weight[:, None], 0) / tl.sum(total * weight, 0)
        tl.store(joined + (sequence * rows_M + row) * C + c, whole, mask=c < C)


def plain(
    query_BNTC: Tensor,
    turned_BNTR: Tensor,
    latent_BSC: Tensor,
    rope_BSR: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Compute the kernel's result by plain products; arguments and result as in `latent_sums`."""
    scores_BMS = torch.bmm(
        (query_BNTC * scale).flatten(1, 2), latent_BSC.mT
    )  # scaled first: half precision could overflow
    scores_BMS = torch.baddbmm(scores_BMS, (turned_BNTR * scale).flatten(1, 2), rope_BSR.mT)
    scores_BNTS = scores_BMS.view(*query_BNTC.shape[:3], -1).float()
    if mask is not None:
        mask = mask[..., : scores_BNTS.shape[-1]]
        scores_BNTS = (
            scores_BNTS.masked_fill(~mask, -1e30) if mask.dtype == torch.bool else scores_BNTS + mask
        )
    weights_BNTS = scores_BNTS.softmax(-1).to(latent_BSC.dtype)
    return torch.bmm(weights_BNTS.flatten(1, 2), latent_BSC).view(query_BNTC.shape)


def fused(
    query_BNTC: Tensor, turned_BNTR: Tensor, latent_BSC: Tensor, rope_BSR: Tensor, mask: Tensor | None,
    scale: float, *,
    tile: int, stages: int, processors: int,
) -> Tensor:  # fmt: skip
    """Run the kernel; arguments and result as in `latent_sums`.

    Args:
        query_BNTC: as in `latent_sums`, and so are the following.
        turned_BNTR: their rotated columns.
        latent_BSC: cached latents.
        rope_BSR: cached rotary keys.
        mask: of new tokens by cached ones.
        scale: factor on scores.
        tile: latents read at once, a power of two from 16 on.
        stages: tiles on their way at a time.
        processors: of the device; the sequence is split so that all have as many programs as fit, one of rank
            512.
    """
    batch, heads, length, rank = query_BNTC.shape
    rows, seen, rope = heads * length, latent_BSC.shape[1], rope_BSR.shape[-1]
    width = max(16, triton.next_power_of_2(rank))
    block = _block(rows, width * latent_BSC.element_size())
    blocks = triton.cdiv(rows, block)
    splits = max(1, min(triton.cdiv(seen, tile), (2 if width <= 256 else 1) * processors // (batch * blocks)))
    sums = torch.empty(batch, splits, rows, rank, dtype=torch.float32, device=latent_BSC.device)
    logarithms = torch.empty(batch, splits, rows, dtype=torch.float32, device=latent_BSC.device)
    kind, strides, ends_B = _NO_MASK, [0, 0, 0], latent_BSC
    if mask is not None:
        kind = _KEPT if mask.dtype == torch.bool else _ADDED
        strides = [mask.stride(i) if mask.shape[i] > 1 else 0 for i in (0, 2)] + [mask.stride(3)]
    if mask is not None and kind == _KEPT:
        ends_B = _ends(mask[..., :seen]).expand(batch).contiguous()
    joined_BNTC = torch.empty(query_BNTC.shape, dtype=query_BNTC.dtype, device=query_BNTC.device)
    _split_sums[(blocks, splits, batch)](
        query_BNTC.contiguous(), turned_BNTR.contiguous(), latent_BSC, rope_BSR,
        latent_BSC if mask is None else mask, ends_B,
        sums, logarithms, rows, length, seen, scale * _LOG2_E,
        *latent_BSC.stride()[:2], *rope_BSR.stride()[:2], *strides,
        C=rank, C2=width, R=rope, R2=max(16, triton.next_power_of_2(rope)), ROWS=block, TILE=tile, MASK=kind,
        num_warps=_warps(block, width), num_stages=stages,
    )  # fmt: skip
    part, together = _join_shape(rows * batch, rank, splits, processors)
    _joined[(rows, batch, triton.cdiv(rank, part))](
        sums, logarithms, joined_BNTC, rows, splits, C=rank, PART=part, TOGETHER=together, num_warps=4
    )
    return joined_BNTC


def _join_shape(rows: int, rank: int, splits: int, processors: int) -> tuple[int, int]:
    """Return the columns that a program joins, and the splits that it reads at once.

    Columns are as many as leave two programs to each processor, since a program that has more of them to read
    waits less often.
    """
    part = max(16, triton.next_power_of_2(rank))
    while part > 64 and rows * triton.cdiv(rank, part) < 2 * processors:
        part //= 2
    return part, min(32, 4096 // part, triton.next_power_of_2(splits))


def _block(rows: int, row_bytes: int) -> int:
    """Return the number of rows of one program."""
    return min(32 if row_bytes <= 1024 else 16, 16 if rows <= 16 else 32)


def _warps(block: int, width: int) -> int:
    """Return the warps of one program: with four, sums of rank 512 would not fit into registers."""
    return 8 if block * width >= 2**14 else 4


def _ends(mask_B1TS: Tensor) -> Tensor:
    """Return the end of each sequence (B,), after the last token that any of the new ones sees.

    A static cache is mostly empty.
    """
    number_S = torch.arange(1, mask_B1TS.shape[-1] + 1, dtype=torch.int32, device=mask_B1TS.device)
    return (mask_B1TS[:, 0].any(1) * number_S).amax(-1)


_chosen: dict[tuple[Any, ...], tuple[int, int] | None] = {}


def _choice(*tensors: Any, scale: float) -> tuple[int, int] | None:
    """Return tile and stages, found at the first use for a device, dtype, widths, rows and mask.

    None: plain products are to be used.
    """
    query_BNTC, _, latent_BSC, rope_BSR, mask = tensors
    kind, is_one_block = None if mask is None else mask.dtype, query_BNTC.shape[1] * query_BNTC.shape[2] <= 16
    key = (latent_BSC.device, latent_BSC.dtype, query_BNTC.shape[-1], rope_BSR.shape[-1], is_one_block, kind)
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return None  # a comparison would break the graph; frameworks run a step before they record one
        _chosen[key] = _first_sound(tensors, scale)
    return _chosen[key]


def _first_sound(tensors: Any, scale: float) -> tuple[int, int] | None:
    """Return the first of TILES that compiles and agrees with plain products."""
    given: tuple[Any, ...] = (*tensors, scale)
    dtype, mask, reason = tensors[2].dtype, tensors[4], ""
    is_boolean = mask is not None and mask.dtype == torch.bool
    # A row that sees no token means nothing: a softmax gives it the mean of all tokens, the kernel another.
    sees_B1T1 = mask[..., : tensors[2].shape[1]].any(-1, keepdim=True) if is_boolean else 1
    for tile, stages in TILES[dtype.itemsize]:
        try:
            precise: tuple[Any, ...] = (*(tensor.float() for tensor in tensors[:4]), mask, scale)
            expected = plain(*precise) * sees_B1T1
            found = fused(*given, tile=tile, stages=stages, processors=_processors(tensors[2].device)).float()
            difference = float((found * sees_B1T1 - expected).norm() / expected.norm().clamp(min=1e-30))
        except (
            Exception
        ) as error:  # a compiler's errors are of many kinds; too little memory for a tile is one
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        if difference <= TOLERANCE[dtype]:
            return tile, stages
        reason = f"it differs from plain products by {difference:.1e}"
    warnings.warn(f"kvfold's fused kernel for latent attention is not used here: {reason}", stacklevel=2)
    return None


def _processors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


# Each output brings a copy of this file: with one name, the operation that was imported last would serve all.
_OPERATION = f"kvfold::latent_sums_{hashlib.sha256(__name__.encode()).hexdigest()[:16]}"


@torch.library.custom_op(_OPERATION, mutates_args=())
def latent_sums(
    query_BNTC: Tensor,
    turned_BNTR: Tensor,
    latent_BSC: Tensor,
    rope_BSR: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Average latents by attention's weights, for inference, since it has no gradient.

    `torch.compile` sees one operation.

    Args:
        query_BNTC: absorbed queries.
        turned_BNTR: their rotated columns.
        latent_BSC: cached latents; columns are contiguous.
        rope_BSR: cached rotary keys; columns are contiguous.
        mask: (B or 1, 1, T, S or more), boolean (what is kept) or added to scores; None: every new token sees
            all.
        scale: factor on scores.

    Returns:
        (B, N, T, C) in the queries' dtype.
    """
    given = (query_BNTC, turned_BNTR, latent_BSC, rope_BSR, mask, scale)
    with torch.cuda.device_of(latent_BSC):  # a kernel starts on the current device, wherever its tensors are
        chosen = _choice(query_BNTC, turned_BNTR, latent_BSC, rope_BSR, mask, scale=scale)
        if chosen is None:
            return plain(*given)
        return fused(*given, tile=chosen[0], stages=chosen[1], processors=_processors(latent_BSC.device))


@latent_sums.register_fake  # type: ignore[untyped-decorator, unused-ignore]
def _(query_BNTC: Tensor, *_: Any) -> Tensor:
    return query_BNTC.new_empty(query_BNTC.shape)


def takes(query: Tensor, turned: Tensor, latent: Tensor, rope: Tensor, module: Any) -> bool:
    """Return whether the kernel can serve an attention module's absorbed queries and cache.

    It cannot where weights are asked for.
    """
    return (
        WANTED
        and triton is not None
        and latent.is_cuda
        and not torch.is_grad_enabled()
        and module.softcap is None
        and module.sinks is None
        and module.config._attn_implementation != "eager"
        and latent.dtype in TOLERANCE
        and query.dtype == turned.dtype == latent.dtype == rope.dtype
        and latent.shape[-1] <= MOST_RANK
        and rope.shape[-1] <= MOST_ROPE
        and latent.stride(-1) == 1
        and (rope.stride(-1) == 1 or rope.shape[-1] == 0)
    )
