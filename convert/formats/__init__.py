"""Output formats, one a file.

Each names a folded layer's tensors and lays them out as the engines load them.
"""

from .linear_norm import to_published, to_trainable

__all__ = ["to_published", "to_trainable"]
