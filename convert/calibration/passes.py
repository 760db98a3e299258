"""One pass of the whole model over the calibration tokens, forward and backward.

layerwise.py uses its batches and its gradient at the last hidden states too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...core.console import progress
from ...core.processes import check_enough, place, together
from .moments import Layout, Sums, watched
from .self_text import check_length, draw
from .statistics import Statistics

_LABELS = 0x5EED1ABE  # sets the draw of labels apart from the draw of a text with the same seed
_LOGITS = 2**24  # of the vocabulary head that exist at once


def collect(
    model: Any,
    sequences: Tensor,
    *,
    layout: Layout,
    batch_size: int,
    calibration: str,
    seed: int,
) -> Statistics:
    """Read sequences once and keep every layer's statistics.

    Under `torch.distributed` each rank reads its share, and all return the sums over ranks.

    Args:
        model: a transformers causal language model in eval mode and float32, with eager attention.
        sequences: token ids (sequences, T), int64.
        layout: the places of the model's quantities.
        batch_size: sequences at once; it changes memory and speed, and no number.
        calibration: the source of the sequences, for the record.
        seed: of the labels.

    Raises:
        InvalidInput: the sequences are too few, too short or too long for the model, or a statistic is NaN or
            infinite.
    """
    check_length(model, sequences.shape[1])
    batches = share(sequences, batch_size, seed)
    layers = {number: Sums() for number in layout.layers}
    with together(), watched(model, layers, layout):
        trunk = model.get_decoder()
        for ids_BT, chance_BT in progress(batches, "statistics", len(batches)):
            hidden_BTD = trunk(input_ids=ids_BT.to(model.device), use_cache=False).last_hidden_state
            hidden_BTD.backward(score(model, hidden_BTD, chance_BT.to(model.device)))
            # The layer where the trouble starts: activations pass it on to later layers, gradients to earlier
            # ones.
            for number in layers:
                layers[number].check_finite(number, backward=False)
            for number in reversed(layers):
                layers[number].check_finite(number, backward=True)
    for sums in layers.values():
        sums.over_ranks()
    return Statistics(
        layers=tuple(sums.means(sequences.numel()) for sums in layers.values()),
        tokens=sequences.numel(),
        calibration=calibration,
        seed=seed,
        ids_BT=sequences,
    )


def share(sequences: Tensor, batch_size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return this process's batches: ids (B, T) and the uniform numbers (B, T) that draw their labels."""
    rank, ranks = place()
    check_enough(len(sequences))
    # All labels' random numbers first: neither the batch size nor the number of ranks changes who gets which.
    chance = torch.rand(
        sequences.shape, generator=torch.Generator().manual_seed(seed ^ _LABELS), dtype=torch.float64
    )
    return list(
        zip(sequences[rank::ranks].split(batch_size), chance[rank::ranks].split(batch_size), strict=True)
    )


def score(model: Any, hidden_BTD: Tensor, chance_BT: Tensor) -> Tensor:
    """Compute the gradient (B, T, D) of the log likelihood of drawn labels at the last hidden states.

    At the logits it is onehot - p; from there the model's own head leads back, with its scales, caps and
    biases.
    """
    rows = max(1, _LOGITS // len(model.get_output_embeddings().weight))
    scores = []
    for hidden_XD, chance_X in zip(
        hidden_BTD.detach().flatten(0, 1).split(rows), chance_BT.flatten().split(rows), strict=True
    ):
        hidden_XD = hidden_XD.requires_grad_()
        with torch.enable_grad(), _given(model.get_decoder(), hidden_XD[None]):
            logits_XV = model(
                input_ids=hidden_XD.new_zeros(1, len(hidden_XD), dtype=torch.int64), use_cache=False
            ).logits[0]
        p_XV = logits_XV.detach().softmax(-1)
        label_X1 = draw(p_XV, chance_X)[:, None]
        logits_XV.backward(p_XV.neg_().scatter_add_(1, label_X1, torch.ones_like(p_XV[:, :1])))
        scores.append(hidden_XD.grad)
    return torch.cat(scores).view_as(hidden_BTD)


@contextmanager
def _given(trunk: Any, hidden_BTD: Tensor) -> Iterator[None]:
    """Have a model without its head return these last hidden states for the duration."""
    trunk.forward = lambda *_, **__: _Output(hidden_BTD)
    try:
        yield
    finally:
        del trunk.forward


class _Output:
    """A base model's output that holds hidden states and nothing else, whatever the class of outputs has."""

    def __init__(self, hidden_BTD: Tensor) -> None:
        self.last_hidden_state = hidden_BTD

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
