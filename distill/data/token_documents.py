"""Documents as token ids with marks: what is trained on in a document, and what it may attend to.

With `packing: documents` a document is BOS, its tokens, EOS. If the tokenizer has no BOS, it begins with EOS,
which separates documents in the training data of such models. All its tokens but the first are predicted, EOS
included, and nothing is predicted across a boundary. So a model learns the end of a text from the text's own
EOS, never from what happens to be packed behind it. With `packing: stream` a document is BOS (or EOS) and its
tokens, and each token is predicted from everything before it.
"""

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...convert.calibration.self_text import sample_from
from ...convert.calibration.written_batches import WrittenBatches
from ...core.errors import InvalidInput
from ...core.memory import gpu_bytes
from ...core.processes import place
from ...texts.sources import read_long_texts
from ...texts.token_parts import read_ids
from ..recipe.data_section import Data, TextSource

START = 1  # mark of a document's first token
SCORED = 2  # mark of a token that is predicted
_AT_ONCE = 2**22  # tokens that the teacher writes between two writes to disk
_WRITTEN_TOGETHER = 32  # sequences per batch that the teacher writes: at most on a GPU, at least on a CPU
_MOST_ON_CPU = 128
_CACHE_ON_CPU = 2**30  # bytes that more than `_WRITTEN_TOGETHER` sequences may take


class Piece(NamedTuple):
    """Tokens that follow each other.

    Attributes:
        ids: int32.
        marks: `START` and `SCORED` of each token, uint8.
    """

    ids: NDArray[np.int32]
    marks: NDArray[np.uint8]


Pieces = Generator[Piece, None, None]


class Ends(NamedTuple):
    """The tokens that a document begins and ends with: at most one each."""

    first: list[int]
    last: list[int]


def ends(tokenizer: Any, packing: str) -> Ends:
    """Return the ends of documents, as the module's docstring says."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    first = bos if bos is not None else eos
    has_end = packing == "documents" and eos is not None
    return Ends([] if first is None else [first], [eos] if has_end else [])


def check_ids(ids: NDArray[np.int32], tokenizer: Any, vocabulary: int, what: str) -> None:
    """Refuse token ids that a model has no embedding for.

    Args:
        ids: any number of them.
        tokenizer: their source.
        vocabulary: number of ids that the model has an embedding for.
        what: the key of the recipe that they are from, and its value.

    Raises:
        InvalidInput: names the largest id.
    """
    largest = int(ids.max(initial=0))
    if largest >= vocabulary:
        raise InvalidInput(
            f"{what}: the tokenizer of {tokenizer.name_or_path} gives id {largest} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}), but the model has embeddings only up to id "
            f"{vocabulary - 1}; use a tokenizer that fits the model, or text without that token"
        )


def text_pieces(source: TextSource, data: Data, tokenizer: Any) -> Pieces:
    """Yield documents of plain text, tokenised without special tokens other than their ends.

    A long document is yielded in parts.

    Raises:
        InvalidInput: the source cannot be read, or its field is missing or is not text.
    """
    around = ends(tokenizer, data.packing)
    for texts in read_long_texts(source.documents, data.seed):
        for parts in read_ids(tokenizer, texts):
            ids = next(parts)
            if not ids and data.packing != "stream":
                continue
            ids, packing = around.first + ids, data.packing
            for following in parts:
                yield document(ids, packing)
                ids, packing = following, "stream"  # only its beginning begins the document
            yield document(ids + around.last, packing)


def document(ids: list[int], packing: str) -> Piece:
    """Return a document, or the beginning of one, whose ids include its ends."""
    marks = np.full(len(ids), SCORED, dtype=np.uint8)
    if packing == "documents":
        marks[:1] = START
    return Piece(np.asarray(ids, dtype=np.int32), marks)


def written_pieces(
    data: Data, tokenizer: Any, teacher: Any, tokens: int, kept: WrittenBatches | None = None
) -> Pieces:
    """Yield text that the teacher writes by itself at temperature 1, in sequences of `data.seq_len`.

    It is at least `tokens` long. A sequence in which the teacher ends a document and continues becomes two
    documents; a document that it has not ended has no EOS. Each process writes a part and gets the whole, so
    all must read to the end.

    Args:
        data: the source and how it is cut.
        tokenizer: the student's.
        teacher: a transformers model; None if the run has none.
        tokens: the least number.
        kept: where finished batches are saved, and from where those of an interrupted run are read.

    Raises:
        InvalidInput: no teacher is there, it takes no sequence of this length, has no embedding for the token
            that it starts from, or predicts NaN.
    """
    if teacher is None:
        raise InvalidInput(
            "data.source self is text that the teacher writes, but this run has no teacher; name a text"
        )
    around = ends(tokenizer, data.packing)
    check_ids(
        np.asarray(around.first, np.int32),
        tokenizer,
        teacher.config.get_text_config().vocab_size,
        "data.source self",
    )
    rows = max(-(-tokens // data.seq_len), place()[1])
    parts = max(1, rows * data.seq_len // _AT_ONCE)
    start = around.first[0] if around.first else None
    for part, share in enumerate(np.array_split(range(rows), parts)):
        which = f", part {part + 1} of {parts}" if parts > 1 else ""
        seed = int(np.random.SeedSequence([data.seed, part]).generate_state(1)[0])
        sequences = sample_from(
            teacher,
            sequences=len(share),
            length=data.seq_len,
            bos=start,
            seed=seed,
            batch_size=_written_together(teacher, data.seq_len),
            purpose="text by the teacher" + which,
            kept=kept,
        )
        for row in sequences.tolist():
            # With a padded vocabulary, a model may by rare chance write an id that stands for no token.
            known = next((at for at, token in enumerate(row) if token >= len(tokenizer)), len(row))
            yield from _split(row[:known], around, data.packing)


def _written_together(teacher: Any, length: int) -> int:
    """Return how many sequences a teacher writes at once: as many as there is room for their cache.

    The more there are, the less of the time goes into reading weights: on a CPU 128 sequences at once of
    SmolLM2-135M take 0.7 of the time of 32 (docs/notes/distillation.md). The size of a GPU decides, not
    what is free of it: logits of other batches are rounded otherwise, and a run that is given again should
    write the same text.
    """
    text = teacher.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cached = 2 * text.num_hidden_layers * heads * width * length * teacher.dtype.itemsize
    if teacher.device.type != "cuda":
        return int(max(_WRITTEN_TOGETHER, min(_MOST_ON_CPU, _CACHE_ON_CPU // cached)))
    room = gpu_bytes() - sum(weight.nbytes for weight in teacher.parameters())
    return int(max(1, min(_WRITTEN_TOGETHER, room // cached)))


def _split(row: list[int], around: Ends, packing: str) -> Iterable[Piece]:
    """Return a sequence as documents, cut after each EOS."""
    if not around.last:
        return [document(row, packing)]
    rest = row[len(around.first) :]
    found = []
    while rest:
        length = rest.index(around.last[0]) + 1 if around.last[0] in rest else len(rest)
        found.append(document(around.first + rest[:length], packing))
        rest = rest[length:]
    return found
