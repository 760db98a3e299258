"""Allocation of rotary slots to frequencies, and of a budget to slots and latent.

Both are answered by predicted losses in one unit (nats, where the metric comes from data): a component left
without a slot loses what the mean over distances loses of its rotation; the latent loses the energy of the
directions that it drops.
Legend: attention.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from scipy import optimize  # type: ignore[import-untyped]
from torch import Tensor

from ..algebra.attention import Attention
from ..algebra.metric import LayerMetric
from ..algebra.subspaces import low_rank_energy
from ..algebra.target import Geometry
from .latent import Band, Keys, saved_by_slots, separate
from .refinement import fitting_device

Layers = Callable[[], Iterable[tuple[Attention, LayerMetric]]]
Losses = dict[int, list[dict[str, float]]]  # of layers, by the width of the slots


def allocate(saved_FK: Tensor, frequencies_F: Tensor, slots: int, table: int = 0) -> tuple[Band, ...]:
    """Give each slot to the frequency where the next component saves most.

    Args:
        saved_FK: the loss that the first, second, ... slot at a frequency saves, summed over the layers;
            falling along K.
        frequencies_F: the source's angular frequencies.
        slots: how many to give.
        table: number of the rotary table.
    """
    best = saved_FK.flatten().argsort(descending=True, stable=True)[:slots] // saved_FK.shape[1]
    counts = torch.bincount(best, minlength=len(frequencies_F)).tolist()
    return tuple(
        Band(frequency=float(frequencies_F[f]), pairs=(f,), slots=n, table=table)
        for f, n in enumerate(counts)
        if n
    )


def assign(layers: Layers, frequencies_F: Tensor, slots_S: Tensor) -> tuple[Band, ...]:
    """Give each slot of a table to the part of the keys that it serves best.

    A slot serves one of the source's pairs, of near frequency, and pairs may have several. It carries one of
    the pair's components, and saves what its own frequency keeps of that component's rotation beyond what the
    mean over distances keeps. Which slot serves which component is an assignment problem.

    Returns:
        The slots that save something, those of a pair from the nearest frequency on.
    """
    saved_SFK = torch.zeros(())
    for attention, metric in layers():
        saved_SFK = saved_SFK + Keys.of(attention, metric).saved_near(frequencies_F, slots_S, metric)
    saved_SX = saved_SFK.flatten(1)
    slots, parts = optimize.linear_sum_assignment(saved_SX.numpy(), maximize=True)
    pairs = torch.as_tensor(parts) // saved_SFK.shape[2]
    bands = [
        Band(frequency=float(slots_S[slot]), pairs=(pair,), slots=1)
        for slot, pair, gain in zip(slots, pairs.tolist(), saved_SX[slots, parts].tolist(), strict=True)
        if gain > 0
    ]
    own_F = frequencies_F.tolist()
    return tuple(sorted(bands, key=lambda band: (band.pairs, abs(own_F[band.pairs[0]] - band.frequency))))


def saved(layers: Layers, frequencies_F: Tensor) -> Tensor:
    """Return the loss that slots save in each layer (L, F, K), falling along K."""
    return torch.stack([saved_by_slots(attention, frequencies_F, metric) for attention, metric in layers()])


def unslotted(saved_FK: Tensor, bands: Iterable[Band]) -> float:
    """Return the loss of a layer's components that have no slot, of its own `saved`, in nats per token."""
    given = sum(float(saved_FK[pair, : band.slots].sum()) for band in bands for pair in band.pairs)
    return (float(saved_FK.sum()) - given) / 2  # the quadratic form's ½


def losses_by_width(
    layers: Layers,
    frequencies_F: Tensor,
    elements: int,
    candidates: Mapping[int, tuple[Band, ...]],
    slot_losses: Mapping[int, Sequence[float]],
) -> Losses:
    """Predict what layers lose of a cache of `elements` per token and layer, by the width of its slots.

    Args:
        layers: gives attention and metric of every layer, each time anew.
        frequencies_F: the layers' angular frequencies.
        elements: kv_lora_rank + qk_rope_head_dim.
        candidates: slots for each value of qk_rope_head_dim to consider.
        slot_losses: the loss of each layer with them, apart from the latent's, in nats per token.

    Returns:
        For each width the losses of every layer, in nats per token where the metric comes from data: `slots`,
        what components without a slot lose of their rotation, and `latent`, what the latent drops.
    """
    losses: Losses = {width: [] for width in candidates}
    device = fitting_device()
    frequencies_F = frequencies_F.to(device)
    for number, (own, costs) in enumerate(layers()):
        attention, metric = own.to(torch.float64, device), costs.to(torch.float64, device)
        keys = Keys.of(attention, metric)
        for width, bands in candidates.items():
            energy = low_rank_energy(*separate(keys, frequencies_F, bands, metric).stack(attention, metric))
            dropped = float(energy[elements - width :].sum()) / 2  # the quadratic form's ½
            losses[width].append({"slots": slot_losses[width][number], "latent": dropped})
    return losses


def least(groups: Sequence[Losses]) -> int:
    """Return the width of slots at which groups of layers together lose least."""
    return min(
        groups[0], key=lambda width: sum(sum(loss.values()) for group in groups for loss in group[width])
    )


def rotary_widths(geometry: Geometry, elements: int) -> list[int]:
    """Return the rotary widths to choose from.

    They are every quarter of a head, or of the cache where that is less, up to two heads, then steps of a
    quarter of the width. Finer steps change the predicted loss by less than its own error, and each costs a
    decomposition of every layer.
    """
    step = max(2, min(geometry.head_dim, elements) // 8 * 2)
    widths, width = [], step
    while width < elements and width <= geometry.cache_elements // 2:
        widths.append(width)
        width += step if width < 2 * geometry.head_dim else max(step, width // 4 // step * step)
    return widths
