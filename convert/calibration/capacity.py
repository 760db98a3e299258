"""Memory that the statistics and the fold of a source take, and memory that is free."""

import math
import os
from dataclasses import dataclass

from ...core.memory import free_bytes, gpu_bytes, system_bytes
from ...models.causal_lm import device
from ..families.source import Source
from .statistics import Statistics

_FLOAT = 4  # bytes of a weight, an activation or a cached number: everything runs in float32
_SUM = 8  # bytes of a statistic
_SAMPLE = 2**15  # tokens of a layer's inputs that are kept, bfloat16
_STEP = 8  # sequences in a step of refinement
# Numbers per token that folding a layer takes: hidden sizes of each token that is kept, then hidden sizes and
# widths of all query heads of each token in a step.
# Measured with the fused kernel (docs/notes/time-and-memory.md).
_ROW, _BY_HIDDEN, _BY_HEADS = 6, 8, 28
_COPIES = 6  # of a latent's numbers, which a fit to them holds at once
_BASE = 6 * 10**8  # bytes of the libraries, and of the logits that exist at once


@dataclass(frozen=True)
class Need:
    """Bytes that the parts of a run take.

    Attributes:
        weights: all weights, float32.
        layer: the weights of one decoder layer.
        rest: the weights outside all decoder layers.
        activations: the tensors that autograd keeps of one batch through all layers.
        statistics: the sums of all layers.
        cached: the keys and values of one sequence in all layers.
        layers: the number of layers, whether they attend or not.
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
        """Bytes of a run with the whole model in memory.

        It passes over one batch, or holds the cache of as many sequences, which is smaller.
        """
        return _BASE + self.weights + self.activations + self.statistics

    @property
    def by_layer(self) -> int:
        """Bytes of a run with one layer in memory, at the layer that passes back over a batch."""
        return _BASE + self.rest + self.layer + (self.activations + self.statistics) // self.layers

    @classmethod
    def of(cls, source: Source, *, sequences: int, length: int) -> "Need":
        """Estimate the need of a source from its shapes, for batches of `sequences` times `length` tokens."""
        checkpoint = source.checkpoint
        geometry = source.geometry
        layers, attending = source.layers, len(source.attending)
        weights = _FLOAT * sum(math.prod(checkpoint.spec(name).shape) for name in checkpoint)
        stem = source.family.projections(0)["o"].partition(".0.")[0]
        inside = _FLOAT * sum(
            math.prod(checkpoint.spec(name).shape) for name in checkpoint if name.startswith(f"{stem}.")
        )
        hidden = geometry.hidden_size
        heads = geometry.num_attention_heads
        width = geometry.head_dim
        keys = geometry.key_width
        feed_forward = source.config.get("intermediate_size") or 4 * hidden
        # Counted in a Llama layer: norms and residuals keep 5 D, heads 4 N·H, the MLP 3 of its width, the
        # softmax two maps.
        token = 5 * hidden + 4 * heads * width + 3 * feed_forward + 2 * heads * length
        return cls(
            weights=weights,
            layer=inside // layers,
            rest=weights - inside,
            activations=_FLOAT * sequences * length * layers * token,
            statistics=attending
            * (
                _SUM * ((hidden + 1) ** 2 + hidden**2 + 2 * keys**2 + heads * width**2) + 2 * hidden * _SAMPLE
            ),
            cached=_FLOAT * length * attending * geometry.cache_elements,
            layers=layers,
        )

    def fitting_sequences(self, weights: int, wanted: int, *, loaded: bool = False) -> int:
        """Return the number of sequences, at most `wanted`, that can be written at once, at least one.

        `weights` are bytes of weights next to the cache; `loaded`: they are in memory already.
        """
        return max(1, min(wanted, (free_bytes() - (0 if loaded else weights)) // self.cached))

    def fitting_layers(self, sequences: int) -> int:
        """Return the number of layers whose weights fit in memory next to the cache of the sequences."""
        free = free_bytes() - self.rest - self.layer - sequences * self.cached
        return max(0, min(self.layers, free // self.layer))


def divided_batch(source: Source, sequences: int, length: int, layerwise: bool | None) -> tuple[Need, int]:
    """Return the need of statistics with batches that fit on a GPU, and the number that divides them.

    Smaller batches come before one layer at a time: that reads all layers again for each token that the
    source writes. The size of the GPU decides, not what is free of it, so that the same command adds the same
    numbers in the same order. On a CPU a batch is small already.

    `sequences` is the most in a batch, `layerwise` as of `study.study`. The number is the first of 1, 2, 4,
    ... that lets the whole model fit, else one layer, else the last.
    """
    if device().type == "cpu":
        return Need.of(source, sequences=sequences, length=length), 1
    divisors = [1 << halving for halving in range(sequences.bit_length())]
    needs = {each: Need.of(source, sequences=max(1, sequences // each), length=length) for each in divisors}
    room, sizes = gpu_bytes(), []
    if not layerwise:
        sizes.append({each: need.whole for each, need in needs.items()})
    if layerwise is not False:
        sizes.append({each: need.by_layer for each, need in needs.items()})
    divisor = next((each for size in sizes for each in divisors if size[each] <= room), divisors[-1])
    return needs[divisor], divisor


def fold_bytes(
    source: Source,
    sample: tuple[int, int] | None = None,
    *,
    levelled: int | None = None,
    stored: int | None = None,
) -> int:
    """Return an upper estimate of the bytes of folding one layer: its attention twice, and a decomposition.

    Args:
        source: the checkpoint.
        sample: the number of sequences that the layer is measured and refined on, and the tokens of each;
            None without statistics.
        levelled: width of a latent whose norm is fitted on the sample; None without such a norm.
        stored: width of a latent that is fitted to a number format of the cache; None without such a format.
    """
    geometry = source.geometry
    sequences, length = sample or (0, 0)
    attention = sum(
        math.prod(source.checkpoint.spec(name).shape) for name in source.reads(source.attending[0])
    )
    side = max(geometry.hidden_size, geometry.key_width)
    # Refinement keeps inputs and target outputs. For the sequences of a step, autograd needs some rows.
    # Scores of all heads exist only where the fused kernel does not compute them.
    rows = _ROW * sequences * length * geometry.hidden_size
    heads = geometry.num_attention_heads * geometry.head_dim
    token = _BY_HIDDEN * geometry.hidden_size + _BY_HEADS * heads + _maps(source) * length
    step = min(sequences, _STEP) * length * token
    # A norm is fitted in float64, to inputs and their squares, then to copies of the latent; a format to
    # copies next to the rest.
    norm = geometry.hidden_size + max(geometry.hidden_size, _COPIES * levelled) if levelled else 0
    moved = sequences * length * _COPIES * (stored or 0)
    fitted = max(_FLOAT * (rows + step), _SUM * sequences * length * norm)
    return _SUM * (3 * attention + 5 * side**2 + moved) + fitted


def _maps(source: Source) -> int:
    """Return how many scores per pair of tokens exist at once while a layer is measured or refined.

    A layer with a bound on its scores or with sinks has three maps per head, and all layers of a source have
    them or none. A window is a mask that all heads share; a single layer with one counts, as layers of any
    kind are folded side by side.
    """
    heads = source.geometry.num_attention_heads
    bound = source.family.soft_cap
    if source.family.sinks is not None or (bound is not None and source.config[bound] is not None):
        return 3 * heads
    has_window = any(source.window(layer) is not None for layer in source.attending)
    return 2 if has_window else 0


def default_jobs(
    source: Source, statistics: Statistics | None, *, levelled: int | None = None, stored: int | None = None
) -> int:
    """Return the number of layers to fold at once: one per thread of torch, if they fit in memory.

    The other arguments are those of `fold_bytes`.
    """
    import torch

    sample = None if statistics is None else (*statistics.layers[0].input_BTD.shape[:2],)
    # Processes of a launcher that share the memory of this machine.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    need = fold_bytes(source, sample, levelled=levelled, stored=stored)
    fitting = min(free_bytes(), system_bytes()) // processes // need
    return max(1, min(torch.get_num_threads(), len(source.attending), fitting))
