"""Checkpoints as models ready to be measured, and whether two of them may be compared."""

import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..convert.containers.modeling_kvfold import KvfoldForCausalLM
from ..convert.containers.remote import carries_own_code, is_remote, source_config
from ..convert.errors import InvalidInput
from .options import Options

_SAMPLE = 10_000  # characters on which two tokenizers must agree


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, in eval mode.

    Attributes:
        path: the directory it was read from.
        tokenizer: its transformers tokenizer.
        model: its transformers causal language model.
    """

    path: Path
    tokenizer: Any
    model: Any

    @property
    def positions(self) -> int | None:
        """The most tokens the model takes; None when its configuration sets no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def vocabulary(self) -> int:
        """How many logits the model gives; may exceed what its tokenizer uses."""
        return int(self.model.config.get_text_config().vocab_size)


def load(directory: Path, options: Options) -> Loaded:
    """Load tokenizer and weights of a local Hugging Face model directory, to the device and in the dtype of `options`.

    Raises:
        InvalidInput: the directory holds no model that can be loaded whole, or there is no such device.
    """
    if not directory.is_dir():
        raise InvalidInput(f"{directory} is not a directory; an evaluation reads a Hugging Face model directory")
    if not (directory / "config.json").is_file():
        raise InvalidInput(f"{directory} has no config.json; name the directory that holds the model")
    cuda = torch.cuda.is_available()
    if options.device == "cuda" and not cuda:
        raise InvalidInput("--device cuda: torch finds no CUDA device here; use --device cpu")
    device = ("cuda" if cuda else "cpu") if options.device == "auto" else options.device
    dtype = "float32" if options.dtype == "auto" and device == "cpu" else options.dtype
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # plain lines only where there is no terminal
    own = carries_own_code(directory)
    if is_remote(directory) and not (own or options.trust_remote_code):
        raise InvalidInput(
            f"the code in {directory} (*_kvfold.py) is not that of this kvfold; read it, then allow it with "
            "--trust-remote-code, or convert the source again"
        )
    # What this kvfold wrote is loaded by its own classes: no file of the checkpoint runs.
    loader, allowed = (
        (KvfoldForCausalLM, {}) if own else (AutoModelForCausalLM, {"trust_remote_code": options.trust_remote_code})
    )
    reading = {"local_files_only": True, **allowed}
    try:
        tokenizer = load_tokenizer(directory, own, **reading)
        model, info = loader.from_pretrained(
            directory, dtype=dtype, device_map=device, output_loading_info=True, ignore_mismatched_sizes=True, **reading
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, StrictDataclassError) as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        raise InvalidInput(f"{directory} cannot be loaded ({type(error).__name__}): {reason}") from error
    # transformers fills what it does not find with random numbers and only warns.
    absent = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if absent:
        raise InvalidInput(f"{directory} cannot be loaded: {len(absent)} weights are missing or misshapen, e.g. {absent[0]}")
    return Loaded(directory, tokenizer, model.eval())


def load_tokenizer(directory: Path, own: bool, **reading: Any) -> Any:
    """A checkpoint's tokenizer; what of it depends on the model's type is looked up as for the source."""
    if own:
        reading["config"] = source_config(directory)
    return AutoTokenizer.from_pretrained(directory, **reading)


def check_comparable(ours: Loaded, theirs: Loaded, text: str) -> None:
    """Check that two models read `text` as the same token ids, so that their probabilities can be compared.

    Raises:
        InvalidInput: the tokenizers differ, or the vocabularies differ by more than padding.
    """
    sample = text[:_SAMPLE]
    if _reading(ours, sample) != _reading(theirs, sample):
        raise InvalidInput(
            f"{ours.path} and {theirs.path} have different tokenizers; a teacher must share the vocabulary of its student"
        )
    common = min(ours.vocabulary, theirs.vocabulary)
    if ours.vocabulary != theirs.vocabulary and len(ours.tokenizer) > common:
        raise InvalidInput(
            f"{ours.path} has {ours.vocabulary} logits and {theirs.path} {theirs.vocabulary}, but their tokenizer has "
            f"{len(ours.tokenizer)} entries; the vocabularies may differ only by padding"
        )


def _reading(loaded: Loaded, sample: str) -> tuple[dict[str, int], int | None, list[int]]:
    tokenizer = loaded.tokenizer
    ids = tokenizer(sample, add_special_tokens=False, verbose=False).input_ids
    return tokenizer.get_vocab(), tokenizer.bos_token_id, ids
