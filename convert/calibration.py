"""Text that the source model writes by itself, for statistics to be taken on.

Drawn at temperature 1 it has, by definition, the distribution on which the model's predictions are right. Measured
(method.md, section 2) 24 to 48 such sequences are as good as the training corpus.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .console import progress
from .errors import InvalidInput
from .ranks import check_enough, gather_rows, place, together


def sample_from(model: Any, *, sequences: int, length: int, bos: int | None, seed: int, batch_size: int) -> Tensor:
    """Text that a model writes by itself, at temperature 1, as token ids (sequences, length), int64, on the CPU.

    Args:
        model: a transformers causal language model in eval mode.
        sequences, length: how many, and tokens in each, the first included.
        bos: what every sequence begins with; None: a first token drawn from the whole vocabulary.
        seed: the same seed gives the same text, whatever the batch size, but for rounding.
        batch_size: sequences that are written at once.

    Under `torch.distributed` each rank writes its share, and all return the whole.

    Raises:
        InvalidInput: the model takes no text of this length, its probabilities are NaN, or there are fewer sequences than
            processes.
    """
    check_length(model, length)
    check_enough(sequences)
    chance = torch.rand(sequences, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rank, ranks = place()
    batches = chance[rank::ranks].split(batch_size)
    with together():
        steps = (step for batch in batches for step in _continue(model, batch, bos))
        columns = list(progress(steps, "calibration text", len(batches) * length))
        texts = [torch.stack(columns[at : at + length], 1) for at in range(0, len(columns), length)]
    return gather_rows(torch.cat(texts), sequences)


def _continue(model: Any, chance_BT: Tensor, bos: int | None) -> Iterator[Tensor]:
    """One batch of text, token by token over the model's own cache; yields ids (B,) on the CPU."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    first_B = (chance_BT[:, 0] * vocabulary).long() if bos is None else torch.full((len(chance_BT),), bos)
    yield first_B
    last_B, cache = first_B.to(model.device), None
    for chance_B in chance_BT[:, 1:].to(model.device).T:
        with torch.no_grad():
            output = model(input_ids=last_B[:, None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, p_BV = output.past_key_values, output.logits[:, -1].softmax(-1)
        if not p_BV.isfinite().all():
            raise InvalidInput("the source predicts NaN, so it can write no calibration text; check its weights")
        last_B = draw(p_BV, chance_B)
        yield last_B.cpu()


def draw(p_XV: Tensor, chance_X: Tensor) -> Tensor:
    """Token ids (X,) drawn from probabilities, one uniform number in [0, 1) each (float64): the inverse of the distribution."""
    below_XV = p_XV.cumsum(-1, dtype=torch.float64)
    aim_X = chance_X[:, None] * below_XV[:, -1:]
    return torch.searchsorted(below_XV, aim_X, right=True).squeeze(1).clamp(max=p_XV.shape[1] - 1)


def check_length(model: Any, length: int) -> None:
    """Refuse sequences that are too short to hold attention, or longer than the model takes."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length
    if not 2 <= length <= limit:
        raise InvalidInput(f"calibration sequences of {length} tokens: the source takes between 2 and {limit}")
