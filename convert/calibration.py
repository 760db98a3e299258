"""The tokens that statistics are taken on, and the source model that reads them.

By default the model writes its own: text drawn from it at temperature 1 has, by definition, the distribution on which its
predictions are right. Measured (method.md, section 2) 24 to 48 such sequences are as good as the training corpus.
"""

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from .console import progress
from .errors import InvalidInput

_BLOCK = 16  # characters of a plain text, for each token of a sequence, that are tokenised at once
_OPEN: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def load_model(directory: Path) -> Any:
    """A local checkpoint as statistics need it: float32, eager attention, eval mode, on the GPU where there is one.

    Raises:
        InvalidInput: it cannot be loaded whole.
    """
    from transformers import AutoModelForCausalLM

    with _failures(directory, "model"), _quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True
        )
    if info["missing_keys"]:  # transformers fills them with random numbers
        raise InvalidInput(f"{directory} cannot be loaded: weights are missing, e.g. {min(info['missing_keys'])}")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def load_tokenizer(directory: Path) -> Any:
    """A local checkpoint's tokenizer.

    Raises:
        InvalidInput: it has none that transformers can load.
    """
    from transformers import AutoTokenizer

    with _failures(directory, "tokenizer"):
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)


@contextmanager
def _failures(directory: Path, what: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        raise InvalidInput(f"the {what} of {directory} cannot be loaded ({type(error).__name__}): {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers, for the duration."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@torch.no_grad()
def sample_from(model: Any, *, sequences: int, length: int, bos: int | None, seed: int, batch_size: int) -> Tensor:
    """Text that a model writes by itself, at temperature 1, as token ids (sequences, length), int64, on the CPU.

    Args:
        model: a transformers causal language model in eval mode.
        sequences, length: how many, and tokens in each, the first included.
        bos: what every sequence begins with; None: a first token drawn from the whole vocabulary.
        seed: the same seed gives the same text, whatever the batch size, but for rounding.
        batch_size: sequences that are written at once.

    Raises:
        InvalidInput: the model takes no text of this length, or its probabilities are NaN.
    """
    check_length(model, length)
    chance = torch.rand(sequences, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    batches = chance.split(batch_size)
    written = (_continue(model, batch, bos) for batch in batches)
    return torch.cat(list(progress(written, "calibration text", len(batches))))


def _continue(model: Any, chance_BT: Tensor, bos: int | None) -> Tensor:
    """One batch of text, token by token over the model's own cache."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    first_B = (chance_BT[:, 0] * vocabulary).long() if bos is None else torch.full((len(chance_BT),), bos)
    ids, cache = [first_B.to(model.device)], None
    for chance_B in chance_BT[:, 1:].to(model.device).T:
        output = model(input_ids=ids[-1][:, None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, p_BV = output.past_key_values, output.logits[:, -1].softmax(-1)
        if not p_BV.isfinite().all():
            raise InvalidInput("the source predicts NaN, so it can write no calibration text; check its weights")
        ids.append(draw(p_BV, chance_B))
    return torch.stack(ids, 1).cpu()


def draw(p_XV: Tensor, chance_X: Tensor) -> Tensor:
    """Token ids (X,) drawn from probabilities, one uniform number in [0, 1) each (float64): the inverse of the distribution."""
    below_XV = p_XV.cumsum(-1, dtype=torch.float64)
    aim_X = chance_X[:, None] * below_XV[:, -1:]
    return torch.searchsorted(below_XV, aim_X, right=True).squeeze(1).clamp(max=p_XV.shape[1] - 1)


def read_sequences(text_file: Path, tokenizer: Any, *, sequences: int, length: int, seed: int) -> Tensor:
    """Windows of a text as token ids (sequences, length), int64; the first token of each is BOS, or else EOS, if there is one.

    Args:
        text_file: UTF-8; .txt, or .jsonl with a field `text` (one document a line), or either with .gz or .xz after it.
        tokenizer: of the source.
        sequences, length: how many, and tokens in each.
        seed: which part of the text is taken: documents, or blocks of a plain text, in a random order.

    Raises:
        InvalidInput: the file is missing, no such text, or too short.
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    documents, wanted = _documents(text_file, _BLOCK * length), sequences * length
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    ids: list[int] = []
    for index in order:
        if len(ids) >= wanted:
            break
        ids += [] if start is None else [start]
        ids += tokenizer(documents[index], add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < wanted:
        raise InvalidInput(
            f"{text_file} holds {len(ids)} tokens, and {sequences} calibration sequences of {length} take {wanted}; "
            "name a longer text or take fewer sequences"
        )
    windows = torch.tensor(ids[:wanted]).view(sequences, length)
    if start is not None:
        windows[:, 0] = start
    return windows


def _documents(file: Path, block: int) -> list[str]:
    """A file's documents; a plain text is cut into blocks of so many characters."""
    packed = file.suffix if file.suffix in _OPEN else ""
    kind = Path(file.name.removesuffix(packed)).suffix
    if kind not in {".txt", ".jsonl"}:
        raise InvalidInput(f"{file} is neither .txt nor .jsonl (.gz or .xz after it), which calibration text can be")
    try:
        with _OPEN[packed](file, "rt", encoding="utf-8") as stream:
            if kind == ".txt":
                text = stream.read()
                return [text[at : at + block] for at in range(0, len(text), block)]
            return [json.loads(line)["text"] for line in stream if line.strip()]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is not UTF-8 text (byte {error.start})") from None
    except (KeyError, TypeError, json.JSONDecodeError):
        raise InvalidInput(f'{file} has a line that is no JSON object with a field "text"') from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise InvalidInput(f"{file} cannot be read: {error}") from None


def check_length(model: Any, length: int) -> None:
    """Refuse sequences that are too short to hold attention, or longer than the model takes."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length
    if not 2 <= length <= limit:
        raise InvalidInput(f"calibration sequences of {length} tokens: the source takes between 2 and {limit}")
