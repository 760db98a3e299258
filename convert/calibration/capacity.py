"""How much memory the statistics and the fold of a source take, and how much there is."""

import math
import os
from dataclasses import dataclass

from ...core.memory import free_bytes, system_bytes
from ..families.source import Source
from .statistics import Statistics

_FLOAT = 4  # bytes of a weight, an activation or a cached number: everything runs in float32
_SUM = 8  # bytes of a statistic
_SAMPLE = 2**15  # tokens of a layer's inputs that are kept, bfloat16
_STEP = 8  # sequences in a step of refinement
_BASE = 6 * 10**8  # bytes of the libraries, and of the logits that exist at once


@dataclass(frozen=True)
class Need:
    """Bytes that parts of a run take.

    Attributes:
        weights: all weights, float32.
        layer, rest: one decoder layer's, and what is in none.
        activations: what autograd keeps of one batch through all layers.
        statistics: the sums of all layers.
        cached: a sequence's keys and values in all layers.
        layers: how many there are.
    """

    weights: int
    layer: int
    rest: int
    activations: int
    statistics: int
    cached: int
    layers: int

    @property
    def whole(self) -> int:
        """With the whole model in memory.

        A pass over one batch, or the cache of as many sequences, which is less.
        """
        return _BASE + self.weights + self.activations + self.statistics

    @classmethod
    def of(cls, source: Source, *, sequences: int, length: int) -> "Need":
        """Estimates from the shapes, for batches of so many sequences of so many tokens."""
        checkpoint, geometry, layers = source.checkpoint, source.geometry, source.layers
        weights = _FLOAT * sum(math.prod(checkpoint.spec(name).shape) for name in checkpoint)
        stem = source.family.projections(0)["o"].partition(".0.")[0]
        inside = _FLOAT * sum(
            math.prod(checkpoint.spec(name).shape) for name in checkpoint if name.startswith(f"{stem}.")
        )
        hidden, heads, width = geometry.hidden_size, geometry.num_attention_heads, geometry.head_dim
        keys, feed_forward = (
            geometry.num_key_value_heads * width,
            source.config.get("intermediate_size") or 4 * hidden,
        )
        # Counted in a Llama layer: norms and residuals keep 5 D, heads 4 N·H, the MLP 3 of its width, the
        # softmax two maps.
        token = 5 * hidden + 4 * heads * width + 3 * feed_forward + 2 * heads * length
        return cls(
            weights=weights,
            layer=inside // layers,
            rest=weights - inside,
            activations=_FLOAT * sequences * length * layers * token,
            statistics=layers
            * (
                _SUM * ((hidden + 1) ** 2 + hidden**2 + 2 * keys**2 + heads * width**2) + 2 * hidden * _SAMPLE
            ),
            cached=_FLOAT * length * layers * geometry.cache_elements,
            layers=layers,
        )

    def sequences_beside(self, weights: int, wanted: int, *, loaded: bool = False) -> int:
        """How many sequences of the wanted ones can be written at once, at least one.

        Args:
            weights: bytes in memory beside their cache.
            wanted: the most.
            loaded: whether those weights are there already.
        """
        return max(1, min(wanted, (free_bytes() - (0 if loaded else weights)) // self.cached))

    def layers_beside(self, sequences: int) -> int:
        """How many layers' weights can stay in memory beside that many sequences' cache."""
        free = free_bytes() - self.rest - self.layer - sequences * self.cached
        return max(0, min(self.layers, free // self.layer))


def fold_bytes(source: Source, sample: tuple[int, int] | None = None) -> int:
    """Bytes that folding one layer takes at most: its attention as it was and as it will be, and the largest
    decomposition.

    Args:
        source: the checkpoint.
        sample: sequences that the layer is measured and refined on, and the tokens of each; None without
            statistics.
    """
    geometry, (sequences, length) = source.geometry, sample or (0, 0)
    attention = sum(math.prod(source.checkpoint.spec(name).shape) for name in source.reads(0))
    side = max(geometry.hidden_size, geometry.num_key_value_heads * geometry.head_dim)
    # Refining keeps inputs and wanted outputs, and of a step's sequences what autograd needs: some rows and
    # three maps a head.
    rows = 2 * sequences * length * geometry.hidden_size
    heads = geometry.num_attention_heads
    step = (
        min(sequences, _STEP)
        * length
        * (6 * geometry.hidden_size + 6 * heads * geometry.head_dim + 3 * heads * length)
    )
    return _SUM * (3 * attention + 5 * side**2) + _FLOAT * (rows + step)


def default_jobs(source: Source, statistics: Statistics | None) -> int:
    """How many layers to fold at once.

    One a thread that torch would use, as many as fit in the free memory.
    """
    import torch

    sample = None if statistics is None else (*statistics.layers[0].input_BTD.shape[:2],)
    beside = int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )  # processes of a launcher that share this machine's memory
    fitting = min(free_bytes(), system_bytes()) // beside // fold_bytes(source, sample)
    return max(1, min(torch.get_num_threads(), source.layers, fitting))
