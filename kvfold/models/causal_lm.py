"""Checkpoints as models ready to be measured, and whether two of them may be compared."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..core.errors import InvalidInput
from ..eval.options import Options
from .fused_attention import level
from .loading import untie
from .remote_code import carries_own_code, is_remote, source_config
from .shipped.modeling_kvfold import KvfoldForCausalLM

_SAMPLE = 10_000  # characters on which two tokenizers must agree


class _Configured(ABC):
    """What a checkpoint's configuration says of a text that it may read."""

    @property
    def positions(self) -> int | None:
        """The most tokens the model takes; None when its configuration sets no limit."""
        return getattr(self._text_config, "max_position_embeddings", None)

    @property
    def vocabulary(self) -> int:
        """How many logits the model gives; may exceed what its tokenizer uses."""
        return int(self._text_config.vocab_size)

    @property
    @abstractmethod
    def _text_config(self) -> Any:
        """The part of the configuration that is of text."""


@dataclass(frozen=True)
class Described(_Configured):
    """A checkpoint without its weights.

    Attributes:
        path: the directory it was read from.
        tokenizer: its transformers tokenizer.
        config: its transformers configuration.
    """

    path: Path
    tokenizer: Any
    config: Any

    @property
    def _text_config(self) -> Any:
        return self.config.get_text_config()


@dataclass(frozen=True)
class Loaded(_Configured):
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
    def device(self) -> torch.device:
        """Where it takes token ids: weights that lie on the disk are brought there when they are used."""
        if self.model.device.type != "meta":
            return torch.device(self.model.device)
        places = [place for place in self.model.hf_device_map.values() if place != "disk"]
        return torch.device(places[0] if places else "cpu")

    @property
    def _text_config(self) -> Any:
        return self.model.config.get_text_config()


def load(directory: Path, options: Options) -> Loaded:
    """Load tokenizer and weights of a local Hugging Face model directory, to the device and in the dtype of
    `options`.

    Raises:
        InvalidInput: the directory holds no model that can be loaded whole, or there is no such device.
    """
    own, reading = _how_to_read(directory, options)
    loader = KvfoldForCausalLM if own else AutoModelForCausalLM
    with _failures(directory):
        tokenizer = load_tokenizer(directory, own, **reading)
        model, info = loader.from_pretrained(
            directory,
            **_placement(options),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **reading,
        )
    # transformers fills what it does not find with random numbers and only warns.
    absent = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if absent:
        raise InvalidInput(
            f"{directory} cannot be loaded: {len(absent)} weights are missing or misshapen, e.g. {absent[0]}"
        )
    ends = [
        module.weight
        for module in (model.get_output_embeddings(), model.get_input_embeddings())
        if module is not None
    ]
    if len(ends) == 2 and ends[0] is not ends[1] and not any(weight.is_meta for weight in ends):
        untie(model)  # accelerate ties by the configuration, which transformers has not followed here
    return Loaded(directory, tokenizer, level(model.eval()))


def describe(directory: Path, options: Options) -> Described:
    """Load tokenizer and configuration of a model directory and none of its weights.

    Raises:
        InvalidInput: the directory holds no model.
    """
    own, reading = _how_to_read(directory, options)
    with _failures(directory):
        tokenizer = load_tokenizer(directory, own, **reading)
        config = (KvfoldForCausalLM.config_class if own else AutoConfig).from_pretrained(directory, **reading)
    return Described(directory, tokenizer, config)


def place_of(options: Options) -> tuple[str, str]:
    """Device and dtype that `auto` stands for here, as words of torch; of the dtype, `auto` may remain.

    Raises:
        InvalidInput: there is no such device.
    """
    cuda = torch.cuda.is_available()
    if options.device == "cuda" and not cuda:
        raise InvalidInput("--device cuda: torch finds no CUDA device here; use --device cpu")
    device = ("cuda" if cuda else "cpu") if options.device == "auto" else options.device
    return device, "float32" if options.dtype == "auto" and device == "cpu" else options.dtype


def _placement(options: Options) -> dict[str, Any]:
    """Where from_pretrained puts the weights.

    On one device, or on accelerators, then in memory, then on disk.
    """
    device, dtype = place_of(options)
    if options.device_map == "one":
        # Of several processes each has a GPU of its own, which is its current one.
        return {
            "dtype": dtype,
            "device_map": f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device,
        }
    from accelerate.utils import get_max_memory

    limits = {place: size for place, size in get_max_memory().items() if device == "cuda" or place == "cpu"}
    if options.cpu_memory is not None:
        limits["cpu"] = options.cpu_memory
    return {
        "dtype": dtype,
        "device_map": options.device_map,
        "max_memory": limits,
        "offload_folder": options.offload_dir,
    }


def _how_to_read(directory: Path, options: Options) -> tuple[bool, dict[str, Any]]:
    """Whether a directory carries this kvfold's own code, and with which arguments transformers reads it."""
    if not directory.is_dir():
        raise InvalidInput(
            f"{directory} is not a directory; an evaluation reads a Hugging Face model directory"
        )
    if not (directory / "config.json").is_file():
        raise InvalidInput(f"{directory} has no config.json; name the directory that holds the model")
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # plain lines only where there is no terminal
    own = carries_own_code(directory)
    if is_remote(directory) and not (own or options.trust_remote_code):
        raise InvalidInput(
            f"the code in {directory} (*_kvfold.py) is not that of this kvfold; read it, then allow it with "
            "--trust-remote-code, or convert the source again"
        )
    # What this kvfold wrote is loaded by its own classes: no file of the checkpoint runs.
    return own, {"local_files_only": True, "trust_remote_code": options.trust_remote_code and not own}


@contextmanager
def _failures(directory: Path) -> Iterator[None]:
    """Say in one line why transformers could not read a directory."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, StrictDataclassError) as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        raise InvalidInput(f"{directory} cannot be loaded ({type(error).__name__}): {reason}") from error


def load_tokenizer(directory: Path, own: bool, **reading: Any) -> Any:
    """A checkpoint's tokenizer; what of it depends on the model's type is looked up as for the source."""
    if own:
        reading["config"] = source_config(directory)
    return AutoTokenizer.from_pretrained(directory, **reading)


def check_comparable(ours: Loaded | Described, theirs: Loaded | Described, text: str) -> None:
    """Check that two models read `text` as the same token ids, so that their probabilities can be compared.

    Raises:
        InvalidInput: the tokenizers differ, or the vocabularies differ by more than padding.
    """
    sample = text[:_SAMPLE]
    if _reading(ours, sample) != _reading(theirs, sample):
        raise InvalidInput(
            f"{ours.path} and {theirs.path} have different tokenizers; a teacher must share the "
            f"vocabulary of its student"
        )
    common = min(ours.vocabulary, theirs.vocabulary)
    if ours.vocabulary != theirs.vocabulary and len(ours.tokenizer) > common:
        raise InvalidInput(
            f"{ours.path} has {ours.vocabulary} logits and {theirs.path} {theirs.vocabulary}, but their "
            f"tokenizer has "
            f"{len(ours.tokenizer)} entries; the vocabularies may differ only by padding"
        )


def _reading(loaded: Loaded | Described, sample: str) -> tuple[dict[str, int], int | None, list[int]]:
    tokenizer = loaded.tokenizer
    ids = tokenizer(sample, add_special_tokens=False, verbose=False).input_ids
    return tokenizer.get_vocab(), tokenizer.bos_token_id, ids
