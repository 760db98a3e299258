"""Every attention variant as a plain torch module: the executable definitions, and converters between them.

heads.py has what they share; folding.py is `fold`, the methods for checkpoints on modules; costs.py counts,
trials.py measures.
"""

from .experts import ExpertLatentAttention as ExpertLatentAttention
from .folding import fold as fold
from .folding import halvings as halvings
from .heads import TokenCache as TokenCache
from .latent_attention import MultiHeadLatentAttention as MultiHeadLatentAttention
from .latent_query import LatentCache as LatentCache
from .latent_query import LatentQueryAttention as LatentQueryAttention
from .multi_head import MultiHeadAttention as MultiHeadAttention
