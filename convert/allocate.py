"""Where rotary slots are worth most, and how to divide a budget between slots and latent.

Both are answered by predicted losses in one unit (nats, where the metric comes from data): a component left without a slot
loses what the mean over distances loses of its rotation; the latent loses the energy of the directions that it drops.
Legend: factor.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Attention
from .factor import Band, saved_by_slots, separate
from .metric import Metric
from .subspaces import low_rank_energy

Layers = Callable[[], Iterable[tuple[Attention, Metric]]]


@dataclass(frozen=True)
class Division:
    """A budget divided.

    Attributes:
        bands: the slots; `2 · slots` is qk_rope_head_dim.
        rank: kv_lora_rank.
        predicted: loss of the whole model, nats a token where the metric comes from data.
    """

    bands: tuple[Band, ...]
    rank: int
    predicted: float


def allocate(saved_FK: Tensor, frequencies_F: Tensor, slots: int) -> tuple[Band, ...]:
    """Give each slot to the frequency where the next component saves most.

    Args:
        saved_FK: what the first, second, ... slot at a frequency saves, summed over the layers; falling along K.
        frequencies_F: the source's angular frequencies.
        slots: how many to give.
    """
    best = saved_FK.flatten().argsort(descending=True, stable=True)[:slots] // saved_FK.shape[1]
    counts = torch.bincount(best, minlength=len(frequencies_F)).tolist()
    return tuple(Band(frequency=float(frequencies_F[f]), pairs=(f,), slots=n) for f, n in enumerate(counts) if n)


def saved(layers: Layers, frequencies_F: Tensor) -> Tensor:
    """What slots save (F, K), summed over the layers; falling along K."""
    return torch.stack([saved_by_slots(attention, frequencies_F, metric) for attention, metric in layers()]).sum(0)


def divide(layers: Layers, frequencies_F: Tensor, elements: int, widths: Iterable[int]) -> Division:
    """The division of a cache of `elements` per token and layer whose predicted loss is least.

    Args:
        layers: gives attention and metric of every layer, each time anew.
        frequencies_F: the source's angular frequencies.
        elements: kv_lora_rank + qk_rope_head_dim.
        widths: values of qk_rope_head_dim to consider.
    """
    saved_FK = saved(layers, frequencies_F)
    candidates = {width: allocate(saved_FK, frequencies_F, width // 2) for width in widths if width < elements}
    predicted = {width: float(saved_FK.sum() - _given(saved_FK, bands)) for width, bands in candidates.items()}
    for attention, metric in layers():
        for width, bands in candidates.items():
            energy = low_rank_energy(*separate(attention, frequencies_F, bands, metric).stack(attention, metric))
            predicted[width] += float(energy[elements - width :].sum())
    width = min(predicted, key=lambda width: predicted[width])
    return Division(candidates[width], elements - width, predicted[width] / 2)  # the quadratic form's ½


def _given(saved_FK: Tensor, bands: tuple[Band, ...]) -> Tensor:
    return torch.stack([saved_FK[pair, : band.slots].sum() for band in bands for pair in band.pairs]).sum()
