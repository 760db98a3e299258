"""Sources that are no plain Llama: other families, quantised and multimodal ones, and commands on them.

Each is a directory of its own in a scene. All heads of a source are equal, so a fold to fewer loses nothing.
"""

import json
from pathlib import Path
from typing import Any

from tests.support.quantised import FORMATS, quantise, quantised_tower
from tests.support.tiny import make
from tests.support.towers import make_multimodal

from .hostile_mutations import (
    FAMILY_CONFIG,
    JSON_FILE,
    QUANTISED_CONFIG,
    SOURCE_TENSORS,
    TOWER_CONFIG,
    Mutation,
)
from .hostile_scene import run, save_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 257,
}
_FOLD = ("--to", "gqa", "--kv-heads", "2", "--calibration", "none", "--out", "@out")
_LATENT = ("--to", "mla", "--rank", "full", "--calibration", "none", "--out", "@out")
# Name of the source -> the family of its model.
FAMILIES = {
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3-text": "gemma3_text",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "mixtral": "mixtral",
    "gpt-neox": "gpt_neox",
    "falcon": "falcon",
    "gpt-oss": "gpt_oss",
    "qwen3-next": "qwen3_next",
    "lfm2": "lfm2",
}
_LATENT_ONLY = ("gpt-neox",)  # whose class has as many key/value heads as query heads
# Name of the source -> its format in `tests.support.quantised`.
QUANTISED = {
    "fp8": "fp8 blocks",
    "fp8-tensor": "fp8 tensor",
    "compressed": "compressed int4 with zeros",
    "compressed-nvfp4": "compressed nvfp4",
    "gptq": "gptq",
    "awq": "awq",
    "bitsandbytes": "bitsandbytes nf4",
    "modelopt": "modelopt nvfp4",
    "mxfp4": "mxfp4",
}
TOWERS = {"llava": "llava", "gemma3": "gemma3", "qwen2-vl": "qwen2_5_vl"}
# Name of the source -> the format of the text tower of a `llava`.
QUANTISED_TOWERS = {"llava-fp8": "fp8 blocks", "llava-compressed": "compressed int4 with zeros"}
NAMES = (*FAMILIES, *QUANTISED, *TOWERS, *QUANTISED_TOWERS)
TOWER = "llava-text"  # the text tower of llava, folded alone


def commands() -> dict[str, tuple[str, ...]]:
    """Return the words of the commands that read these sources, by name."""
    found: dict[str, tuple[str, ...]] = {}
    for name in NAMES:
        options = _LATENT if name in _LATENT_ONLY else _FOLD
        if name in QUANTISED:
            options = ("--dtype", "float32", *options)  # in which a fold of equal heads is exact
        found[f"convert {name}"] = ("convert", f"@{name}", *options)
        found[f"plan {name}"] = ("plan", f"@{name}", "--calibration", "none", "--json")
        found[f"eval {name}"] = (
            "eval", f"@{name}", "--text", "@text.txt", "--suite", "ppl", "--window", "16", "--max-windows",
            "2",
            "--device", "cpu", "--json",
        )  # fmt: skip
    for name in (*QUANTISED, *QUANTISED_TOWERS):
        found[f"convert {name} dequantised"] = (*found[f"convert {name}"], "--dequantize")
    for name in (*TOWERS, *QUANTISED_TOWERS):
        found[f"convert {name} text"] = (*found[f"convert {name}"], "--text-only")
    found["assemble"] = ("assemble", f"@{TOWER}", "@llava", "--json", "--out", "@out")
    return found


def files() -> dict[str, tuple[tuple[Mutation, ...], tuple[str, ...]]]:
    """Return the files of these sources, how their content is changed, and the commands that read them."""
    found: dict[str, tuple[tuple[Mutation, ...], tuple[str, ...]]] = {}
    for name in NAMES:
        changes = (
            FAMILY_CONFIG if name in FAMILIES else QUANTISED_CONFIG if name in QUANTISED else TOWER_CONFIG
        )
        if name in QUANTISED_TOWERS:
            changes = (*TOWER_CONFIG, *QUANTISED_CONFIG)
        reading = tuple(command for command, words in commands().items() if f"@{name}" in words)
        found[f"{name}/config.json"] = changes, reading
        found[f"{name}/model.safetensors"] = SOURCE_TENSORS, reading
    found[f"{TOWER}/config.json"] = JSON_FILE, ("assemble",)
    found[f"{TOWER}/kvfold.json"] = JSON_FILE, ("assemble",)
    found[f"{TOWER}/model.safetensors"] = SOURCE_TENSORS, ("assemble",)
    return found


def write(scene: Path, name: str) -> None:
    """Write a source of `NAMES` into a scene, with a tokenizer of bytes."""
    directory = scene / name
    if name in TOWERS:
        make_multimodal(directory, TOWERS[name], **_SIZES)
    elif name in QUANTISED_TOWERS:
        plain = scene / f"{name}-plain"
        make_multimodal(plain, "llava", **_SIZES)
        quantise(plain, directory, quantised_tower(QUANTISED_TOWERS[name]))
        for part in (plain, scene / f"{name}-twin"):
            _remove(part)
    elif name in FAMILIES:
        make(directory, FAMILIES[name], equal_heads=True, **_SIZES)
    else:
        form = FORMATS[QUANTISED[name]]
        plain = scene / f"{name}-plain"
        make(plain, form.family, equal_heads=True, intermediate_size=64, **_SIZES)
        quantise(plain, directory, form)
        for part in (plain, scene / f"{name}-twin"):
            _remove(part)
    for file in ("tokenizer.json", "chat_template.jinja"):
        (directory / file).unlink(missing_ok=True)
    save_tokenizer(directory)


def write_tower(scene: Path) -> None:
    """Fold the text tower of a scene's `llava` alone; what it was made of stays next to it."""
    run("convert", scene / "llava", *_FOLD[:-2], "--text-only", "--out", scene / TOWER)


def _remove(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


def is_quantised(directory: Path) -> bool:
    """Return whether a checkpoint says that it is quantised."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("quantization_config")) or (directory / "hf_quant_config.json").exists()
