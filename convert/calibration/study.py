"""From what the user said of calibration to statistics of a source.

Read back, or taken on text of its own or another.
"""

import hashlib
import itertools
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.console import is_first, notice
from ...core.errors import InvalidInput
from ...core.memory import free_bytes
from ...core.processes import together
from ...models.causal_lm import device, load_model, load_tokenizer
from ...models.layered_model import LayeredModel
from ...texts.documents import check_calibration, read_sequences
from ..families.packing import half_order, split
from ..families.recognition import family_of
from ..families.source import Source
from . import layerwise as by_layer
from . import passes
from .capacity import Need
from .moments import Layout
from .self_text import sample_from
from .statistics import RUN_DIGITS, Statistics, read_run

# Read at once. On a CPU more takes no less time, but memory in proportion; an accelerator wants more at once.
CPU_TOKENS, SEQUENCES = 512, 8
_SAMPLED = 1024  # elements of each tensor, by which a source is recognised


def batch_size(length: int) -> int:
    """How many sequences of so many tokens statistics read at once."""
    return max(1, CPU_TOKENS // length) if device().type == "cpu" else SEQUENCES


def study(
    source: Source,
    calibration: str,
    *,
    sequences: int,
    length: int,
    seed: int,
    save: Path | None = None,
    layerwise: bool | None = None,
    work: Path | None = None,
) -> Statistics | None:
    """Statistics of a source, or None for weights only.

    Args:
        source: the checkpoint.
        calibration: `none`; `self`, text sampled from the model at temperature 1; a text as
            `documents.check_calibration` takes it; or a .safetensors file of statistics saved earlier.
        sequences: how many sequences are read.
        length: tokens of each, cut to the model's positions; distances beyond it are not seen.
        seed: of the text and the labels.
        save: where to keep the statistics, so that other folds of this source need not take them again.
        layerwise: whether the model is read layer by layer, in the memory of one; None: when it does not fit
            as a whole.
        work: where what goes between layers is kept meanwhile, unless TMPDIR is set; the current directory by
            default.

    Raises:
        InvalidInput: there is no such file, it is of another model, or a statistic is not finite.
    """
    with together():
        saved = _settled(source, calibration, save)
        if saved is not None or calibration == "none":
            return saved
        length = min(length, source.positions)
        need = Need.of(source, sequences=min(batch_size(length), sequences), length=length)
        if layerwise is None:
            layerwise = need.whole > free_bytes()
        directory = source.checkpoint.directory
        run = ""
        if calibration != "self":
            tokens = read_sequences(
                calibration, load_tokenizer(directory), sequences=sequences, length=length, seed=seed
            )
        if save is not None:
            text = "self" if calibration == "self" else hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
            run = _run(source, [text, _name(calibration), sequences, length, seed])
        if save is not None and save.exists():
            return _reused(save, run, work)
        model = LayeredModel(source.checkpoint) if layerwise else load_model(directory)
    if calibration == "self":
        tokens = _written(source, model, need, sequences=sequences, length=length, seed=seed)
    how: dict[str, Any] = {"layout": layout_of(source), "batch_size": batch_size(length), "seed": seed}
    how["calibration"] = _name(calibration)
    if isinstance(model, LayeredModel):
        statistics = by_layer.collect(model, tokens, **how, work=_place(work))
    else:
        statistics = passes.collect(model, tokens, **how)
    if save is not None and is_first():
        statistics.save(save, run)
    return statistics


def _place(work: Path | None) -> Path:
    """A directory that exists: TMPDIR where it is set, else the one asked for or the nearest above it."""
    if "TMPDIR" in os.environ:
        return Path(tempfile.gettempdir())
    place = (work or Path()).absolute()
    return next(path for path in (place, *place.parents) if path.is_dir())


def _settled(source: Source, calibration: str, save: Path | None) -> Statistics | None:
    """Saved statistics, where the user names them; mistakes that need no model show here."""
    if calibration == "none":
        if save is not None:
            raise InvalidInput(
                "--save-statistics has nothing to save with --calibration none; use --calibration self"
            )
        return None
    if save is not None and (save.exists() or save.is_symlink()) and not read_run(save):
        raise InvalidInput(f"--save-statistics {save} exists and nothing is overwritten; name another file")
    if save is not None and not save.absolute().parent.is_dir():
        raise InvalidInput(
            f"--save-statistics {save}: there is no directory {save.parent}; make it, or name another file"
        )
    if calibration.endswith(".safetensors"):
        if save is not None:
            raise InvalidInput(
                f"--save-statistics has nothing to save: {calibration} holds saved statistics already"
            )
        return _fitting(Statistics.load(Path(calibration)), source, calibration)
    if calibration != "self":
        check_calibration(calibration)
    return None


def _run(source: Source, asked: list[Any]) -> str:
    """Return a hexadecimal SHA-256 of everything that decides statistics: the source and what is asked.

    Of every tensor of the source the first elements count, which any training changes; copies of a source
    have the same.
    """
    checkpoint = source.checkpoint
    digest = hashlib.sha256(json.dumps([checkpoint.config, asked], sort_keys=True).encode())
    for name in sorted(checkpoint):
        spec = checkpoint.spec(name)
        digest.update(f"{name} {spec.dtype} {spec.shape}".encode())
        for _, piece in itertools.islice(checkpoint.stream(name), 1):
            digest.update(piece[:_SAMPLED].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _reused(file: Path, run: str, work: Path | None) -> Statistics:
    """Return the statistics that an earlier run of the same command has saved before it was killed.

    Raises:
        InvalidInput: the file holds other statistics.
    """
    if read_run(file) != run[:RUN_DIGITS]:
        raise InvalidInput(f"--save-statistics {file} exists and nothing is overwritten; name another file")
    notice(f"{file} holds the statistics of this very command, and is used as it is")
    statistics = Statistics.load(file)
    if file.stat().st_size < free_bytes():
        return replace(statistics, layers=tuple(layer.copied() for layer in statistics.layers))
    return replace(statistics, layers=tuple(layer.parked(_place(work)) for layer in statistics.layers))


def _written(source: Source, model: Any, need: Need, *, sequences: int, length: int, seed: int) -> Tensor:
    """Sample text from the source, with as many sequences at once as fit in memory."""
    settings: dict[str, Any] = {
        "sequences": sequences,
        "length": length,
        "bos": source.config.get("bos_token_id"),
        "seed": seed,
    }
    if not isinstance(model, LayeredModel):
        return sample_from(
            model, batch_size=need.fitting_sequences(need.weights, sequences, loaded=True), **settings
        )
    batch = need.fitting_sequences(need.layer + need.rest, sequences)
    kept = need.fitting_layers(batch)
    times = -(-sequences // batch) * length
    notice(
        f"the source is larger than memory and writes {sequences} sequences of its own: "
        f"{len(model.blocks) - kept} of its "
        f"{len(model.blocks)} layers are read {times} times; on a text (--calibration FILE) they would be "
        f"read twice"
    )
    with model.streamed(kept) as whole:
        return sample_from(whole, batch_size=batch, **settings)


def _name(calibration: str) -> str:
    """Return the name of the text in the record."""
    return (
        calibration
        if calibration == "self"
        else f"text:{Path(calibration).name if Path(calibration).exists() else calibration}"
    )


def layout_of(source: Source) -> Layout:
    """Where the quantities of a source are in its transformers model."""
    # A checkpoint of the bare model leaves the prefix out; the module has it all the same.
    family, geometry = (
        replace(source.family, prefix=family_of(source.checkpoint.config).prefix),
        source.geometry,
    )
    order_H = half_order(family, geometry.head_dim, source.rotary_width)

    def heads(role: str, output_BTC: Tensor) -> dict[str, Tensor]:
        output_CBT = output_BTC.movedim(-1, 0)
        rows = (
            split(output_CBT, family, geometry)
            if role == "qkv"
            else (output_CBT.unflatten(0, (-1, geometry.head_dim)),)
        )
        found = dict(zip(role, rows, strict=True))
        return {
            one: (rows_IHBT if one == "v" else rows_IHBT[:, order_H]).permute(2, 3, 0, 1)
            for one, rows_IHBT in found.items()
        }

    return Layout(projections=family.projections, split=heads)


def _fitting(statistics: Statistics, source: Source, file: str) -> Statistics:
    geometry = source.geometry
    found = (
        len(statistics.layers),
        statistics.layers[0].input_EE.shape[0] - 1,
        *statistics.layers[0].query_NHH.shape[:2],
    )
    wanted = (source.layers, geometry.hidden_size, geometry.num_attention_heads, geometry.head_dim)
    if found != wanted:
        raise InvalidInput(
            f"{file} holds statistics of a model with (layers, hidden_size, heads, head_dim) {found}, the "
            f"source has {wanted}"
        )
    return statistics
