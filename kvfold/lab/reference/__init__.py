"""Attention variants as plain torch modules, folded by the methods for checkpoints, counted and measured."""

from .modules import MultiHeadAttention as MultiHeadAttention
from .modules import MultiHeadLatentAttention as MultiHeadLatentAttention
from .modules import TokenCache as TokenCache
