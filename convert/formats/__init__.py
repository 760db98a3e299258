"""Output formats, one a file.

What a folded layer is called and looks like in a checkpoint that stock engines load.
"""

from .linear_norm import to_published, to_trainable

__all__ = ["to_published", "to_trainable"]
