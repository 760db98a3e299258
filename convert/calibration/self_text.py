"""Text that the source model writes by itself, on which statistics are collected.

Text drawn at temperature 1 has, by definition, the distribution on which the model's predictions are right.
Half of it is cut as windows of packed documents are: 48 such sequences are then about as good as text that
the model was trained on (docs/notes/calibration.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.console import notice, progress
from ...core.errors import InvalidInput
from ...core.processes import check_enough, gather_rows, place, together
from ...models.caches import cache_argument, cache_of, growing_cache, positions_behind
from .written_batches import WrittenBatches

BLOCK = 256  # tokens of the vocabulary per block; a draw selects a block first
_CUTS = 0xC07  # sets the draw of cuts apart from the draw of a text with the same seed


@dataclass(frozen=True)
class OwnText:
    """Text that a model wrote.

    Attributes:
        tokens_BT: ids, int64, on the CPU.
        entropy_BT: entropy of the prediction that each token but the first was drawn from, nats; float32.
    """

    tokens_BT: Tensor
    entropy_BT: Tensor


def sample_from(model: Any, **arguments: Any) -> Tensor:
    """Return the tokens of `write_text`, which has the same arguments."""
    return write_text(model, **arguments).tokens_BT


def write_text(
    model: Any,
    *,
    sequences: int,
    length: int,
    bos: int | None,
    seed: int,
    batch_size: int,
    purpose: str = "calibration text",
    kept: WrittenBatches | None = None,
) -> OwnText:
    """Sample text from a model at temperature 1.

    Under `torch.distributed` each rank writes its part, and every rank returns the whole.

    Args:
        model: a transformers causal language model in eval mode.
        sequences: the number of sequences.
        length: tokens per sequence, the first included.
        bos: the first token of every sequence; None to draw one from the whole vocabulary.
        seed: the same seed gives the same text for every batch size, apart from rounding.
        batch_size: sequences that are written at once.
        purpose: of the text, as its progress is named.
        kept: where finished batches are saved, and from where those of an interrupted run are read.

    Raises:
        InvalidInput: the model takes no text of this length, its probabilities are NaN, or there are fewer
            sequences than processes.
    """
    check_length(model, length)
    check_enough(sequences)
    chance = torch.rand(sequences, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rank, ranks = place()
    batches = chance[rank::ranks].split(batch_size)
    with together():
        written = [kept.find(batch, bos) if kept else None for batch in batches]
        missing = [at for at, found in enumerate(written) if found is None]
        if len(missing) < len(batches):
            notice(f"{purpose}: {len(batches) - len(missing)} of {len(batches)} batches were written before")

        def steps() -> Iterator[None]:
            for at in missing:
                columns = []
                for column in _continue(model, batches[at], bos):
                    columns.append(column)
                    yield
                ids, entropies = zip(*columns, strict=True)
                written[at] = found = torch.stack(ids, 1), torch.stack(entropies, 1)
                if kept:
                    kept.save(batches[at], bos, *found)

        for _ in progress(steps(), purpose, len(missing) * length):
            pass
        tokens_BT, entropy_BT = (torch.cat(parts) for parts in zip(*filter(None, written), strict=True))

    return OwnText(gather_rows(tokens_BT, sequences), gather_rows(entropy_BT[:, 1:].contiguous(), sequences))


def packed(tokens_BT: Tensor, eos: int | None, seed: int) -> Tensor:
    """Return a text in which every second sequence is a window of packed documents.

    Models are trained and used on windows that begin in the middle of a document, and continue behind its end
    with another one; a text that a model writes begins with a document, and is rarely long enough to end it.
    A model may attend very differently there: without such windows, folds of a small model lost ten times as
    much behind the end of a document as before it (docs/notes/calibration.md).

    Args:
        tokens_BT: sequences that begin with a document, int64.
        eos: the token at the end of a document; None where documents have no mark.
        seed: of the places where documents are cut.
    """
    sequences, length = tokens_BT.shape
    if sequences < 2 or length < 2:
        return tokens_BT
    generator = torch.Generator().manual_seed(seed ^ _CUTS)
    cut = torch.randint(1, length, (sequences,), generator=generator).tolist()
    packed_BT = tokens_BT.clone()
    for row in range(1, sequences, 2):
        following_T = tokens_BT[row + 2 if row + 2 < sequences else 1]
        is_marked = eos is not None and eos != int(following_T[0])
        mark = following_T.new_tensor([eos] if is_marked else [])
        packed_BT[row] = torch.cat([tokens_BT[row, cut[row] :], mark, following_T])[:length]
    return packed_BT


def _continue(model: Any, chance_BT: Tensor, bos: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one batch of text, token by token; the model uses its own cache.

    Yields:
        Ids (B,) and the entropy of each one's prediction (B,), on the CPU.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    first_B = (chance_BT[:, 0] * vocabulary).long() if bos is None else torch.full((len(chance_BT),), bos)
    yield first_B, torch.zeros(len(first_B))
    last_B = first_B.to(model.device)
    cache, named = growing_cache(model.config, chance_BT.shape[1]), cache_argument(model)
    for chance_B in chance_BT[:, 1:].to(model.device).T:
        with torch.no_grad():
            output = model(
                input_ids=last_B[:, None],
                **{named: cache},
                use_cache=True,
                logits_to_keep=1,
                **positions_behind(model, cache, last_B[:, None]),
            )
            cache = cache_of(output)
            p_BV = output.logits[:, -1].softmax(-1)
        if not p_BV.isfinite().all():
            raise InvalidInput(
                "the source predicts NaN, so it can write no calibration text; check its weights"
            )
        last_B = draw(p_BV, chance_B)
        yield last_B.cpu(), torch.special.entr(p_BV).sum(-1, dtype=torch.float32).cpu()


def draw(p_XV: Tensor, chance_X: Tensor) -> Tensor:
    """Draw token ids (X,) from probabilities by inverting their distribution.

    A block of the vocabulary is drawn first, then a token in it by the rest of the number. Cumulating all
    tokens in float64 would take a twentieth of the time that a narrow model takes for its statistics.

    Args:
        p_XV: probabilities.
        chance_X: uniform numbers in [0, 1), float64.
    """
    vocabulary = p_XV.shape[1]
    p_XLW = pad(p_XV, (0, -vocabulary % BLOCK)).unflatten(1, (-1, BLOCK))
    block_X, rest_X = _invert(p_XLW.sum(-1), chance_X)
    inside_X, _ = _invert(p_XLW[torch.arange(len(p_XV), device=p_XV.device), block_X], rest_X)
    return (block_X * BLOCK + inside_X).clamp(max=vocabulary - 1)  # above it with NaN as weights


def _invert(p_XC: Tensor, chance_X: Tensor) -> tuple[Tensor, Tensor]:
    """Return the choices (X,) at given proportions of the cumulated weights.

    The second result (X,) is the position of each within its own weight, in [0, 1).
    """
    below_XC = p_XC.cumsum(-1, dtype=torch.float64)
    aim_X1 = chance_X[:, None] * below_XC[:, -1:]
    chosen_X1 = torch.searchsorted(below_XC, aim_X1, right=True).clamp(max=p_XC.shape[1] - 1)
    own_X1 = p_XC.gather(1, chosen_X1).double()
    share_X1 = 1 - (below_XC.gather(1, chosen_X1) - aim_X1) / own_X1
    return chosen_X1.squeeze(1), share_X1.squeeze(1).clamp(0, 1 - 2**-53)


def check_length(model: Any, length: int) -> None:
    """Check that sequences are long enough for attention and no longer than the model takes.

    Raises:
        InvalidInput: they are not.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length
    if not 2 <= length <= limit:
        raise InvalidInput(
            f"calibration sequences of {length} tokens: the source takes between 2 and {limit}; choose a "
            "length in between"
        )
