"""Checkpoints that engines are tried on, and their folds: what benchmarks.vllm and benchmarks.cuda_check run.

Random ones have equal key/value heads, so that a fold to fewer, or to a latent, computes what its source
does: what an engine says of the fold can be held against the source itself. The bundled demo checkpoint is
trained, and its folds lose something.
"""

import json
import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvfold.convert.cli import main as convert
from kvfold.core.errors import InvalidInput
from tests.support.quantised import FORMATS, Format, quantise
from tests.support.tiny import make
from tests.support.towers import make_multimodal

DEMO = Path(__file__).parent.parent / "recipes" / "demo"
HEAD = 64  # the narrowest head that engines have every kernel for


def _rounding_inputs(name: str, kind: str) -> Format:
    """Return a format of compressed-tensors by which an engine also rounds what enters a product.

    Args:
        name: of tests/support/quantised.py's FORMATS.
        kind: `int` or `float`, both in 8 bits and with a scale per token.
    """
    form = FORMATS[name]
    config = deepcopy(form.config)
    for group in config["config_groups"].values():
        group["input_activations"] = {
            "num_bits": 8,
            "type": kind,
            "strategy": "token",
            "dynamic": True,
            "symmetric": True,
        }
    return replace(form, config=config)


_SMALL: dict[str, Any] = {"equal_heads": True, "hidden_size": 64, "head_dim": HEAD}
_WIDE: dict[str, Any] = {"equal_heads": True, "hidden_size": 256, "intermediate_size": 1024}
_DERIVED: dict[str, Any] = {"equal_heads": True, "hidden_size": 8 * HEAD}  # head_dim is a quotient
SOURCES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", **_SMALL, "rms_norm_eps": 1e-5},
    "llama, linear rope": {"family": "llama", **_SMALL, "rope": "linear"},
    "qwen2": {"family": "qwen2", "equal_heads": True, "hidden_size": 8 * HEAD},
    "qwen3": {"family": "qwen3", **_SMALL},
    "gpt_neox": {"family": "gpt_neox", **_WIDE},
    "gpt2": {"family": "gpt2", **_WIDE, "n_inner": 1024},
    "gemma2": {
        "family": "gemma2",
        **_SMALL,
        "query_pre_attn_scalar": HEAD,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "phi3": {"family": "phi3", **_DERIVED},
    "mixtral": {"family": "mixtral", **_SMALL},
    "mixtral, 8 heads": {"family": "mixtral", **_DERIVED, "head_dim": HEAD, "sliding_window": None},
    "olmo2": {"family": "olmo2", **_DERIVED},
    "granite": {"family": "granite", **_DERIVED},
    "glm4": {"family": "glm4", **_SMALL},
    "smollm3": {"family": "smollm3", **_DERIVED},
}

# Quantised copies by name: of which source, in which format. vLLM has kernels for these two on any CPU.
QUANTISED: dict[str, tuple[str, Format]] = {
    "llama, W8A8": ("llama", _rounding_inputs("compressed int8", "int")),
    "llama, FP8": ("llama", _rounding_inputs("compressed fp8", "float")),
}

# Multimodal ones: fields of their text_config and vision_config, for heads as wide. Frequencies of M-RoPE are
# half as many as a head is wide.
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "llava": {"head_dim": HEAD},
    "mistral3": {"head_dim": HEAD},
    "gemma3": {"head_dim": HEAD},
    "qwen2_5_vl": {
        "hidden_size": 4 * HEAD, "rope_parameters": _MROPE, "vision": {"out_hidden_size": 4 * HEAD},
    },
    "qwen3_vl": {"head_dim": HEAD, "rope_parameters": _MROPE},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fold:
    """A conversion.

    Attributes:
        source: of SOURCES, QUANTISED or MULTIMODAL, or `demo`.
        options: of `kvfold convert`.
        exact: whether it computes what its source does.
        as_claimed: whether vLLM's cache is as small as kvfold.json says.
    """

    source: str
    options: str
    exact: bool = True
    as_claimed: bool = True

    @property
    def rope_intact(self) -> bool:
        """Return whether its cache holds positions where others hold values."""
        return "--rope intact" in self.options


_STOCK = "--to mla --rank 512 --engine vllm --container stock"
_REMOTE = "--to mla --rank 512 --engine vllm --container remote"
FITTED = "--latent-norm fitted --length 128 --sequences 8 --refine 0"  # wants statistics of a text
_INTACT = "--to mla --rank full --rope intact"
FOLDS = (
    Fold(source="llama", options="--to gqa --kv-heads 2"),
    Fold(source="qwen2", options="--to gqa --kv-heads 2"),
    Fold(source="qwen3", options="--to gqa --kv-heads 2"),
    Fold(source="gpt_neox", options="--to gqa --kv-heads 2"),
    Fold(source="gpt2", options="--to mqa"),
    Fold(source="demo", options="--to gqa --kv-heads 2", exact=False),
    Fold(source="llama", options=_STOCK),
    Fold(source="demo", options=_STOCK, exact=False),
    Fold(source="demo", options=f"{_STOCK} {FITTED}", exact=False),
    Fold(source="llama", options=_REMOTE),
    Fold(source="qwen2", options=_REMOTE),
    Fold(source="qwen3", options=_REMOTE, exact=False),
    Fold(source="llama, linear rope", options=_REMOTE, exact=False),
    Fold(source="demo", options=_REMOTE, exact=False),
    Fold(source="qwen3", options=_INTACT),
    Fold(source="llama", options=_INTACT, as_claimed=False),
)

_WITH_PLUGIN = "--to mla --engine vllm+kvfold"
WITH_PLUGIN = (
    Fold(source="llama", options=f"{_WITH_PLUGIN} --container stock --rank 64 --rope-dim 32", exact=False),
    Fold(source="qwen2", options=f"{_WITH_PLUGIN} --container remote --rank 96 --rope-dim 32", exact=False),
    Fold(source="qwen3", options=f"{_WITH_PLUGIN} --container remote --rank 96 --rope-dim 32", exact=False),
    Fold(source="llama", options=f"{_WITH_PLUGIN} --container stock --rank 256 --rope-dim 64", exact=False),
    Fold(source="llama", options=f"{_WITH_PLUGIN} --container remote --rank 256 --rope-dim 64", exact=False),
    # vLLM serves these by itself.
    Fold(source="llama", options="--to gqa --kv-heads 2"),
    Fold(source="llama", options=_STOCK, exact=False),
    Fold(source="qwen3", options=_REMOTE, exact=False),
    Fold(source="qwen3", options=_INTACT),
)


# Both are rounded, each by its own weights: they are held against themselves in transformers.
OF_QUANTISED = tuple(
    Fold(source=name, options=options, exact=False)
    for name in QUANTISED
    for options in ("--to gqa --kv-heads 2", _STOCK)
)
IN_PLACE = tuple(
    Fold(source=name, options=options, exact=False)
    for name, options in zip(MULTIMODAL, ("--to gqa --kv-heads 2", "--to mqa") * 3, strict=False)
)
FAMILIES = tuple(
    Fold(source=name, options="--to gqa --kv-heads 2")
    for name in ("gemma2", "phi3", "mixtral", "olmo2", "granite", "glm4", "smollm3")
)


def make_folds(
    root: Path, only: str = "", folds: tuple[Fold, ...] = FOLDS
) -> Iterator[tuple[Fold, Path, Path]]:
    """Each of some folds with the directories of its source and of its output, made when it is asked for.

    Args:
        root: where they are made.
        only: words that a fold's source or options must contain.
        folds: to make.
    """
    for number, fold in enumerate(folds):
        if only not in f"{fold.source} {fold.options}":
            continue
        source, out = root / fold.source.replace(", ", "-").replace(" ", "-"), root / f"fold-{number}"
        if not source.exists():
            if fold.source == "demo":
                widen(DEMO, source, HEAD)
            elif fold.source in QUANTISED:
                plain, form = QUANTISED[fold.source]
                quantise(make(root / f"plain-{number}", **SOURCES[plain]), source, form)
            elif fold.source in MULTIMODAL:
                make_multimodal(source, fold.source, **MULTIMODAL[fold.source])
            else:
                make(source, **SOURCES[fold.source])
        calibration = [] if FITTED in fold.options else ["--calibration", "none"]
        arguments = [str(source), *fold.options.split(), *calibration, "--out", str(out)]
        convert.main(arguments, standalone_mode=False)
        yield fold, source, out


def widen(source: Path, out: Path, width: int) -> Path:
    """Copy a Llama checkpoint with its heads filled up with zeros to a width: the same function in wider
    heads.

    Pair j of a head turns as fast as pair j·W/H of one W wide, so every frequency has its place; scores are
    scaled by W^-½, so queries grow by (W/H)^½.
    Legend: N heads, H and W narrow and wide head dim, D hidden size.

    Raises:
        InvalidInput: the width is no multiple of the head dim.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    narrow = config["head_dim"]
    if width % narrow:
        raise InvalidInput(f"{width} is no multiple of a head's {narrow} dimensions")
    step = width // narrow
    places = torch.arange(0, width, step)  # the pairs' halves are W/2 apart, as they were H/2
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        role = name.split(".")[-2]
        if role in {"q_proj", "k_proj"}:
            tensors[name] = _spread(tensor, narrow, width, places) * (step**0.5 if role == "q_proj" else 1)
        elif role == "v_proj":
            tensors[name] = _spread(tensor, narrow, width, torch.arange(narrow))
        elif role == "o_proj":
            tensors[name] = _spread(tensor.mT, narrow, width, torch.arange(narrow)).mT.contiguous()
        else:
            tensors[name] = tensor
    out.mkdir()
    for path in source.glob("*.json"):
        shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps({**config, "head_dim": width}), encoding="utf-8")
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def _spread(rows: Tensor, narrow: int, width: int, places_H: Tensor) -> Tensor:
    """Rows (N·H, D) at their places among zeros, (N·W, D)."""
    narrow_NHD = rows.unflatten(0, (-1, narrow))
    wide_NWD = narrow_NHD.new_zeros(len(narrow_NHD), width, rows.shape[1])
    wide_NWD[:, places_H] = narrow_NHD
    wide: Tensor = wide_NWD.flatten(0, 1)
    return wide
