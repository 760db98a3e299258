"""Attention variants as plain torch modules, folded by the methods for checkpoints, counted and measured."""

from .heads import TokenCache as TokenCache
from .latent_attention import MultiHeadLatentAttention as MultiHeadLatentAttention
from .multi_head import MultiHeadAttention as MultiHeadAttention
