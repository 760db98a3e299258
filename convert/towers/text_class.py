"""The text model that a multimodal class builds, for a text_config of another class."""

from functools import cache, lru_cache
from pathlib import Path

import torch

from ...checkpoints.directory import read_config
from ...core.errors import InvalidInput
from ...models.dequantised import without_quantisation
from ...models.expected_weights import multimodal_class
from ...models.load_failures import loading_failures, no_warnings

STOCK = "deepseek_v3"  # model type of the class of --container stock
_SMALL = {"num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": None}


def holds_other_classes(directory: Path, model_type: str) -> bool:
    """Return whether the class of a multimodal checkpoint builds the text model that its text_config names.

    Some classes do; others build a text model of their own, whatever text_config says. A small model without
    weights shows it.
    """
    return _holds(str(read_config(directory).get("model_type")), model_type)


@cache
def _holds(kind: str, model_type: str) -> bool:
    from transformers import CONFIG_MAPPING, MODEL_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    try:
        with loading_failures(Path(kind), "config.json"), no_warnings(), torch.device("meta"):
            config = CONFIG_MAPPING[kind](text_config={"model_type": model_type, **_SMALL})
            model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config)
            return type(model.get_decoder()) is MODEL_MAPPING[CONFIG_MAPPING[model_type]]
    except InvalidInput:  # the class reads other fields of a text_config
        return False


def decoder_place(directory: Path) -> str:
    """Return the name of the text model inside the class of a multimodal checkpoint."""
    return _place_in(directory, (directory / "config.json").read_bytes())


@lru_cache(maxsize=4)
def _place_in(directory: Path, content: bytes) -> str:
    """Return `decoder_place` of a config.json with that content: a large class takes seconds to build."""
    from transformers import AutoConfig

    with loading_failures(directory, "config.json"), no_warnings(), torch.device("meta"):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        config = without_quantisation(config)
        kind = multimodal_class(config)
        model = None if kind is None else kind._from_config(config)
    if model is None:
        raise InvalidInput(
            f"{directory} is quantised, and transformers has no class of it that writes text; its text tower "
            "can be folded alone, with --text-only"
        )
    decoder = model.get_decoder()
    return next(str(name) for name, module in model.named_modules() if module is decoder)
