"""Causal language models of transformers: their tokenizer, configuration and weights, read from a directory.

A multimodal model, given text alone, is one too where the caller says so. Every failure to read one is
reported here, in one sentence.
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.directory import SIDE_FILES, TOKENIZER_FILES, check_safetensors, read_config
from ..checkpoints.other_forms import without_config
from ..checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint, is_quantised
from ..checkpoints.side_files import check_readable
from ..core.console import is_terminal
from ..core.errors import InvalidInput
from ..core.untrusted import printable, shorten
from .dequantised import from_tensors, without_quantisation
from .expected_weights import check_found, check_loadable, multimodal_class
from .load_failures import loading_failures, no_progress_bars
from .load_options import LoadOptions
from .remote_code import carries_own_code, check_form, code_refusal, is_remote, source_config

_SAMPLE = 10_000  # characters on which two tokenizers must agree


@dataclass(frozen=True)
class Described:
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
    def positions(self) -> int | None:
        """The most tokens the model takes; None when its configuration sets no limit."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @property
    def vocabulary(self) -> int:
        """The number of logits per token, which may exceed the tokenizer's entries."""
        return int(self.config.get_text_config().vocab_size)


@dataclass(frozen=True)
class Loaded(Described):
    """A checkpoint in memory, in eval mode.

    Attributes:
        model: its transformers model, which gives logits for `input_ids`.
    """

    model: Any

    @property
    def device(self) -> torch.device:
        """The device that token ids must be on; weights on the disk are brought there when they are used."""
        if self.model.device.type != "meta":
            return torch.device(self.model.device)
        places = [place for place in self.model.hf_device_map.values() if place != "disk"]
        return torch.device(places[0] if places else "cpu")


def load(directory: Path, options: LoadOptions, *, multimodal: bool = False) -> Loaded:
    """Load tokenizer and weights of a local model directory, to the device and in the dtype of `options`.

    Raises:
        InvalidInput: the directory holds no model that can be loaded whole, or there is no such device.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    from .fused_attention import keep_bounds, level

    own, trusted = _check_directory(directory, options)
    described = describe(directory, options, multimodal=multimodal)
    loader = _own_class() if own else AutoModelForCausalLM
    if multimodal and not (own or trusted) and type(described.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        loader = multimodal_class(described.config)
    model = _read_weights(
        loader,
        directory,
        hide_progress=not is_terminal(sys.stderr),
        trust_remote_code=trusted,
        **_placement(options),
    )
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    ends = [module.weight for module in (head, embedding) if module is not None]
    if len(ends) == 2 and ends[0] is not ends[1] and not any(weight.is_meta for weight in ends):
        untie(model)  # accelerate ties by the configuration, which transformers has not followed here
    return Loaded(directory, described.tokenizer, model.config, level(keep_bounds(model.eval())))


def describe(directory: Path, options: LoadOptions, *, multimodal: bool = False) -> Described:
    """Load tokenizer and configuration of a model directory and none of its weights.

    Args:
        directory: the model.
        options: only `trust_remote_code` is read.
        multimodal: whether it may be a model that takes images, too.

    Raises:
        InvalidInput: the directory holds no model.
    """
    own, trusted = _check_directory(directory, options)
    tokenizer = load_tokenizer(directory, trust_remote_code=trusted)
    config = _configuration(directory, own=own, trusted=trusted)
    if not trusted:
        _check_class(directory, config, multimodal=multimodal)
    return Described(directory, tokenizer, config)


def _configuration(directory: Path, *, own: bool, trusted: bool = False) -> Any:
    """Return the configuration of the unquantised model, read by kvfold's own class or by transformers."""
    from transformers import AutoConfig

    reader = _own_class().config_class if own else AutoConfig
    with loading_failures(directory, "model"):
        config = reader.from_pretrained(directory, local_files_only=True, trust_remote_code=trusted)
    return without_quantisation(config)


def _check_class(directory: Path, config: Any, *, multimodal: bool = False) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    other = multimodal_class(config)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_loadable(directory, config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    elif isinstance(config, _own_class().config_class):
        check_form(directory, read_config(directory))
        check_loadable(directory, config, _own_class())
    elif multimodal and other is not None:
        check_loadable(directory, config, other)
    else:
        is_multimodal = any(hasattr(config, part) for part in ("vision_config", "audio_config"))
        raise InvalidInput(
            f"{directory} is no causal language model of transformers (model_type {config.model_type}); "
            + (
                "write its text tower alone with `kvfold convert --text-only`, and put it back with `kvfold "
                "assemble`"
                if is_multimodal
                else "name one"
            )
        )


def load_model(directory: Path) -> Any:
    """Load a local checkpoint without its tokenizer: float32, eager attention, on this process's device.

    Raises:
        InvalidInput: it cannot be loaded whole.
    """
    from transformers import AutoModelForCausalLM

    model = _read_weights(
        _own_class() if carries_own_code(directory) else AutoModelForCausalLM,
        directory,
        hide_progress=True,
        trust_remote_code=False,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    return model.to(device()).eval()


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a local checkpoint.

    A remote output's tokenizer is looked up by the source's model type.

    Raises:
        InvalidInput: it has none that transformers can load.
    """
    from transformers import AutoTokenizer

    check_readable(directory, SIDE_FILES)
    if not any(path.match(pattern) for path in directory.iterdir() for pattern in TOKENIZER_FILES):
        raise InvalidInput(
            f"{printable(directory)} has no tokenizer; copy tokenizer.json and tokenizer_config.json of the "
            "model that it was made from into it"
        )
    with loading_failures(directory, "tokenizer"):
        config = {"config": source_config(directory)} if carries_own_code(directory) else {}
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code, **config
        )
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise InvalidInput(
            f"{directory} has model_max_length {shorten(longest)} in tokenizer_config.json, where a "
            "number is needed"
        )
    return tokenizer


def build_empty(directory: Path, attention: str | None, dtype: torch.dtype) -> Any:
    """Build the model of a local checkpoint by its configuration, without reading a weight.

    Args:
        directory: the checkpoint; a remote output is built by kvfold's own class.
        attention: transformers' attention implementation; None: the one that transformers chooses.
        dtype: of the parameters.

    Raises:
        InvalidInput: transformers cannot build the model.
    """
    from transformers import AutoModelForCausalLM

    from .fused_attention import keep_bounds, level

    options: dict[str, Any] = {"dtype": dtype}
    if attention is not None:
        options["attn_implementation"] = attention
    own = carries_own_code(directory)
    config = _configuration(directory, own=own)
    _check_class(directory, config)
    with loading_failures(directory, "model"):
        if own:
            return _own_class()._from_config(config, **options)
        made = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        return level(keep_bounds(with_base(made)))


def _own_class() -> Any:
    from .shipped.modeling_kvfold import KvfoldForCausalLM as Own

    # So that `save_pretrained` of a loaded model writes this code next to the weights.
    Own.config_class.register_for_auto_class("AutoConfig")
    Own.register_for_auto_class("AutoModelForCausalLM")
    return Own


def _read_weights(loader: Any, directory: Path, *, hide_progress: bool, **options: Any) -> Any:
    """Call a class's `from_pretrained` and check that it found every weight; pickles are never read."""
    check_safetensors(directory)
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with loading_failures(directory, "model"), no_progress_bars() if hide_progress else nullcontext():
        if is_quantised(directory):
            model, info = from_tensors(loader, QuantisedCheckpoint(directory), **options)
        else:
            model, info = loader.from_pretrained(
                directory, local_files_only=True, use_safetensors=True, **options
            )
    check_found(directory, info)
    return with_base(model)


def with_base(model: Any) -> Any:
    """Correct the name of the module below the head, where a class names one that it lacks.

    Llama 4's text class does: its `base_model` is then the whole model, whose output has no hidden states.
    """
    if not hasattr(model, model.base_model_prefix) and hasattr(model, "model"):
        model.base_model_prefix = "model"
    return model


def untie(model: Any) -> None:
    """Record in a model's configuration that its head is not its embeddings, so that nothing ties them."""
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    model.all_tied_weights_keys.pop(f"{head}.weight", None)


def device() -> torch.device:
    """Return the device of this process: its current GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def place_of(options: LoadOptions) -> tuple[str, str]:
    """Resolve `auto` in the options for this machine.

    Returns:
        Device and dtype as torch names them; the dtype may remain `auto`, the checkpoint's own.

    Raises:
        InvalidInput: there is no such device.
    """
    cuda = torch.cuda.is_available()
    if options.device.partition(":")[0] == "cuda" and not cuda:
        raise InvalidInput(f"--device {options.device}: torch finds no CUDA device here; use --device cpu")
    chosen = options.device
    if chosen == "auto":
        chosen = "cuda" if cuda else "cpu"
    dtype = "float32" if options.dtype == "auto" and chosen == "cpu" else options.dtype
    return chosen, dtype


def _placement(options: LoadOptions) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that say where weights are put."""
    chosen, dtype = place_of(options)
    if options.device_map == "one":
        # Each of several processes has a GPU of its own, which is its current one.
        place = f"cuda:{torch.cuda.current_device()}" if chosen == "cuda" else chosen
        return {"dtype": dtype, "device_map": place}
    from accelerate.utils import get_max_memory

    limits = {place: size for place, size in get_max_memory().items() if chosen == "cuda" or place == "cpu"}
    if options.cpu_memory is not None:
        limits["cpu"] = options.cpu_memory
    return {
        "dtype": dtype,
        "device_map": options.device_map,
        "max_memory": limits,
        "offload_folder": options.offload_dir,
    }


def _check_directory(directory: Path, options: LoadOptions) -> tuple[bool, bool]:
    """Check that a directory can be read without running code that the user has not allowed.

    Returns:
        Two booleans. The first: the directory carries this kvfold's own code. The second: its Python files
        may run. Those of an output of this kvfold never run, since kvfold's own classes stand for them.
    """
    if not directory.is_dir():
        raise InvalidInput(f"{directory} is not a directory; name a Hugging Face model directory")
    if not (directory / "config.json").is_file():
        raise InvalidInput(without_config(directory))
    check_safetensors(directory)
    own = carries_own_code(directory)
    if is_remote(directory) and not (own or options.trust_remote_code):
        raise InvalidInput(code_refusal(directory))
    return own, options.trust_remote_code and not own


def check_comparable(ours: Described, theirs: Described, text: str) -> None:
    """Check that two models read `text` as the same token ids, so that their probabilities can be compared.

    Raises:
        InvalidInput: the tokenizers differ, or the vocabularies differ by more than padding.
    """
    readings = []
    for tokenizer in (ours.tokenizer, theirs.tokenizer):
        ids = tokenizer(text[:_SAMPLE], add_special_tokens=False, verbose=False).input_ids
        readings.append((tokenizer.get_vocab(), tokenizer.bos_token_id, ids))
    if readings[0] != readings[1]:
        raise InvalidInput(
            f"{ours.path} and {theirs.path} have different tokenizers; a teacher must share the vocabulary "
            "of its student"
        )
    common = min(ours.vocabulary, theirs.vocabulary)
    if ours.vocabulary != theirs.vocabulary and len(ours.tokenizer) > common:
        raise InvalidInput(
            f"{ours.path} has {ours.vocabulary} logits and {theirs.path} {theirs.vocabulary}, but their "
            f"tokenizer has {len(ours.tokenizer)} entries; the vocabularies may differ only by padding"
        )
