"""MLA of any width in vLLM on a CPU, from the cache of latents and rotary keys.

vLLM stores the cache, expands the latents of prompts, and merges the parts of a chunked prompt. This adds
decoding, which vLLM's kernel does for one width only.

Legend: B sequences that decode, N query heads, S cached tokens of one of them, C latent rank, W width of the
cache, C and the rotary key's.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import (
    CPUMLABackend,
    CPUMLAImpl,
)


class AnyWidthMetadata(MLACommonMetadata):
    """A step's metadata, for any width."""

    def __post_init__(self) -> None:
        """Check no width: vLLM's own class knows three."""


class AnyWidthBuilder(MLACommonMetadataBuilder):
    """A builder of such metadata."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, metadata_cls=AnyWidthMetadata)


class AnyWidthAttention(CPUMLAImpl):
    """Attention whose decoding is written in torch."""

    def forward_mqa(
        self, q: tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, None]:
        """Attend with one new token of each sequence to everything that is cached of it.

        Products and softmax are float32.

        Args:
            q: queries (B, N, C) that the up-projection of keys has been applied to, and their rotary parts.
            kv_c_and_k_pe_cache: blocks of tokens (blocks, tokens, W).
            attn_metadata: has the length of each sequence and the numbers of its blocks.
            layer: not used.

        Returns:
            Sums of latents (B, N, C), and None.
        """
        query_BNW = torch.cat(q, dim=-1).float() * self.scale
        sums_BNC = q[0].new_empty(q[0].shape)
        decode, size = attn_metadata.decode, kv_c_and_k_pe_cache.shape[1]
        for row, length in enumerate(decode.seq_lens.tolist()):
            blocks = decode.block_table[row, : -(-length // size)]
            cached_SW = kv_c_and_k_pe_cache[blocks].flatten(0, 1)[:length].float()
            weights_NS = (query_BNW[row] @ cached_SW.mT).softmax(-1)
            sums_BNC[row] = weights_NS @ cached_SW[:, : self.kv_lora_rank]
        return sums_BNC, None


class AnyWidthBackend(CPUMLABackend):
    """vLLM's backend for MLA on CPUs, with decoding for any width and blocks of any size."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return no list, which stands for any width."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return that blocks may have any number of tokens."""
        return [MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Return that it does."""
        return True

    @staticmethod
    def get_impl_cls() -> type[AnyWidthAttention]:
        """Return the class that computes."""
        return AnyWidthAttention

    @staticmethod
    def get_builder_cls() -> type[AnyWidthBuilder]:
        """Return the class that prepares a step."""
        return AnyWidthBuilder
