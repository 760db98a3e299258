"""Text that a fold is calibrated on, as the user names it: `self`, a text, or half of each (`self+TEXT`)."""

from pathlib import Path

from torch import Tensor

from ...core.errors import InvalidInput
from ...core.untrusted import printable
from ...models.causal_lm import load_tokenizer
from ...texts.calibration_name import parts
from ...texts.documents import read_sequences
from ..families.source import Source


def count_read(calibration: str, sequences: int) -> int:
    """Return how many of the sequences are read from a text; the source writes the others."""
    own, text = parts(calibration)
    if text is None:
        return 0
    if own and sequences < 2:
        raise InvalidInput(
            f"--sequences {sequences} leaves --calibration {printable(calibration)} no sequence of each "
            "kind; use at least 2"
        )
    return sequences // 2 if own else sequences


def read_text(source: Source, text: str, *, sequences: int, length: int, seed: int) -> Tensor:
    """Return tokens of a text (sequences, length), each an id that the source has an embedding for.

    Raises:
        InvalidInput: the text cannot be read or is too short, or the tokenizer writes ids without embeddings.
    """
    directory = source.checkpoint.directory
    tokens = read_sequences(text, load_tokenizer(directory), sequences=sequences, length=length, seed=seed)
    largest, vocabulary = int(tokens.max()), source.config["vocab_size"]
    if largest >= vocabulary:
        raise InvalidInput(
            f"the tokenizer of {directory} writes the id {largest}, but the model has {vocabulary} "
            "embeddings; use the model's own tokenizer"
        )
    return tokens


def alternating(own_BT: Tensor | None, read_BT: Tensor | None) -> Tensor:
    """Return the sequences of one text, or of two by turns.

    By turns, both are among the last sequences, which are held back from refinement.

    Args:
        own_BT: text of the source's own, as many sequences as of the other or one more.
        read_BT: another text, at least as long; what is longer is cut off.
    """
    if read_BT is None or own_BT is None:
        (one_BT,) = (text_BT for text_BT in (own_BT, read_BT) if text_BT is not None)
        return one_BT
    both_BT = own_BT.new_empty(len(own_BT) + len(read_BT), own_BT.shape[1])
    both_BT[0::2], both_BT[1::2] = own_BT, read_BT[:, : own_BT.shape[1]]
    return both_BT


def name_of(calibration: str) -> str:
    """Return the name of the text in the record."""
    own, text = parts(calibration)
    if text is None:
        return calibration
    return f"{'self+' if own else ''}text:{Path(text).name if Path(text).exists() else text}"
