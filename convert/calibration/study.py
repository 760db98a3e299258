"""Statistics of a source as the user asks for them: read from a file, or taken on a text.

The text is the source's own or another.
"""

import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.directory import Checkpoint
from ...core.console import is_first, notice
from ...core.errors import InvalidInput
from ...core.files import check_makeable
from ...core.memory import enough_memory, free_bytes
from ...core.processes import from_every, together
from ...core.version import __version__
from ...core.work import fingerprint
from ...models.causal_lm import device, load_model, with_base
from ...models.dequantised import from_tensors
from ...models.expected_weights import check_found
from ...models.layered_model import LayeredModel
from ...models.load_failures import loading_failures, no_progress_bars
from ...texts.calibration_name import names_statistics, parts
from ...texts.documents import check_calibration
from ..families.family import Family
from ..families.packing import split, split_queries
from ..families.recognition import family_of
from ..families.source import Source
from . import layerwise as by_layer
from . import passes
from .calibration_text import alternating, count_read, name_of, read_text
from .capacity import Need, divided_batch
from .moments import Layout
from .reach import default_length, reach_of, readings
from .self_text import packed, write_text
from .statistics import RUN_DIGITS, SOURCE_DIGITS, Statistics, read_run
from .written_batches import WrittenBatches

# Read at once. On a CPU more saves no time and takes memory in proportion; an accelerator wants more.
CPU_TOKENS, SEQUENCES = 512, 8
_FILE = "statistics.safetensors"
_SAMPLED = 1024  # elements of each tensor that identify a source


def batch_size(length: int) -> int:
    """Return how many sequences of `length` tokens are read at once."""
    return max(1, CPU_TOKENS // length) if device().type == "cpu" else SEQUENCES


def fitting_batch(source: Source, tokens_BT: Tensor) -> int:
    """Return how many sequences are read at once with one layer in memory, at most `batch_size`."""
    sequences, length = tokens_BT.shape
    most = min(batch_size(length), sequences)
    _, divisor = divided_batch(source, most, length, layerwise=True)
    return max(1, most // divisor)


@enough_memory("read shorter sequences with --length, or one layer at a time with --layerwise")
def study(
    source: Source,
    calibration: str,
    *,
    sequences: int,
    length: int | None = None,
    seed: int,
    save: Path | None = None,
    layerwise: bool | None = None,
    work: Path | None = None,
    kept: Path | None = None,
) -> Statistics | None:
    """Return the statistics of a source, or None where weights alone are used.

    Args:
        source: the checkpoint.
        calibration: `none`; `self`, text sampled from the model at temperature 1; a text as
            `documents.check_calibration` takes it, behind `self+` for half of each; or saved statistics.
        sequences: number of sequences that are read.
        length: tokens per sequence, at most the model's positions. None: `reach.default_length`, or less
            where the source's own text breaks down before.
        seed: of the text and the labels.
        save: a file that keeps the statistics for other folds of this source.
        layerwise: whether one layer at a time is in memory; None: when the model does not fit whole.
        work: the directory for activations between layers, unless TMPDIR is set; by default the current one.
        kept: a directory of kvfold's where text and statistics are kept, unless `save` is given, and where
            those of an interrupted run are found.

    Raises:
        InvalidInput: there is no such file, it is of another model, a statistic is not finite, memory is
            full, or another run saves other statistics as `save` in the meantime.
    """
    with together():
        saved = read_saved(source, calibration, save)
        if saved is not None or calibration == "none":
            return saved
        own, text = parts(calibration)
        chosen = length is None
        length = default_length(source, calibration) if length is None else min(length, source.positions)
        need, divisor = divided_batch(source, min(batch_size(length), sequences), length, layerwise)
    if layerwise is None:
        layerwise = any(from_every(need.whole > free_bytes()))  # all exchange the same sums
    with together():
        reads_tokens = source.family.unlike and source.config.get("hidden_size_per_layer_input")
        if layerwise and (source.folded != source.attending or reads_tokens):
            what = "embeddings of the tokens" if reads_tokens else "keys and values of earlier ones"
            raise InvalidInput(
                f"layers of {source.family.label} read {what}, so that its statistics need the whole model "
                "in memory; use more memory, or --calibration none"
            )
        count = count_read(calibration, sequences)
        read_BT = read_text(source, text, sequences=count, length=length, seed=seed) if text else None
        asked = [
            "self" if read_BT is None else hashlib.sha256(read_BT.numpy().tobytes()).hexdigest(),
            name_of(calibration),
            *(sequences, length, seed),
            *(["at most"] if chosen and own else []),
        ]
        identity = _identity(source.checkpoint)
        writer = fingerprint(__version__, source.checkpoint.config, identity, device().type)
        run = fingerprint(writer, asked)
        if save is not None and save.exists():
            return _reused(save, run, work)
        place = None if kept is None or save is not None else kept / _FILE
        if place is not None and place.exists() and read_run(place) == run[:RUN_DIGITS]:
            notice("the statistics of the interrupted run are used as they are")
            return _loaded(place, work)
        model = LayeredModel(source.checkpoint) if layerwise else whole_model(source.checkpoint)
    own_BT, end = None, None
    if own:
        how: dict[str, Any] = {"sequences": sequences - count, "length": length, "seed": seed}
        how["kept"] = WrittenBatches(kept, writer) if kept else None
        own_BT, end = _own_text(source, model, need, chosen, **how)
    tokens_BT = alternating(own_BT, read_BT)
    taken = _collect(source, model, tokens_BT, divisor, work, calibration=name_of(calibration), seed=seed)
    statistics = replace(taken, reach=end, source=identity)
    if save is not None and is_first():
        _keep(statistics, save, run)
    if place is not None and is_first():
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        if statistics.nbytes < shutil.disk_usage(place.parent).free // 2:
            statistics.save(place, run)
    return statistics


def whole_model(checkpoint: Checkpoint) -> Any:
    """Load a source as `load_model` does, also where its weight files lie in another directory."""
    directory = checkpoint.directory
    if checkpoint.is_in_place:
        return load_model(directory)
    from transformers import AutoModelForCausalLM

    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": False}
    how |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with loading_failures(directory, "model"), no_progress_bars():
        model, info = from_tensors(AutoModelForCausalLM, checkpoint, **how)
    check_found(directory, info)
    return with_base(model).to(device()).eval()


def _keep(statistics: Statistics, file: Path, run: str) -> None:
    """Save statistics, unless another run of the same command has saved the same ones in the meantime."""
    if file.exists() and read_run(file) == run[:RUN_DIGITS]:
        if Statistics.load(file).fingerprint() != statistics.fingerprint():
            raise InvalidInput(
                f"another run has saved {file} with other numbers in the meantime; run this command again to "
                f"use them"
            )
        notice(f"another run has saved {file} in the meantime; it holds the same statistics")
        return
    statistics.save(file, run)


def _collect(
    source: Source, model: Any, tokens: Tensor, divisor: int, work: Path | None, **about: Any
) -> Statistics:
    """Take statistics on some tokens, in batches divided by `divisor`."""
    size = max(1, min(batch_size(tokens.shape[-1]), len(tokens)) // divisor)
    how: dict[str, Any] = {"layout": layout_of(source), "batch_size": size, **about}
    if isinstance(model, LayeredModel):
        return by_layer.collect(model, tokens, **how, work=_place(work))
    return passes.collect(model, tokens, **how)


def _place(work: Path | None) -> Path:
    """Return a directory that exists: TMPDIR where it is set, else `work` or the nearest one above it."""
    if "TMPDIR" in os.environ:
        return Path(tempfile.gettempdir())
    place = (work or Path()).absolute()
    return next(path for path in (place, *place.parents) if path.is_dir())


def read_saved(source: Source, calibration: str, save: Path | None) -> Statistics | None:
    """Return saved statistics, where the user names them; refuse mistakes that need no model to be seen.

    Arguments are those of `study`.
    """
    if calibration == "none":
        if save is not None:
            raise InvalidInput(
                "--save-statistics has nothing to save with --calibration none; use --calibration self"
            )
        return None
    if save is not None:
        if (save.exists() or save.is_symlink()) and not read_run(save):
            raise InvalidInput(
                f"--save-statistics {save} exists and nothing is overwritten; name another file"
            )
        if not save.absolute().parent.is_dir():
            raise InvalidInput(
                f"--save-statistics {save}: there is no directory {save.parent}; make it, or name "
                "another file"
            )
        if not save.exists() and is_first():
            check_makeable(save)
    if names_statistics(calibration):
        if save is not None:
            raise InvalidInput(
                f"--save-statistics has nothing to save: {calibration} holds saved statistics already"
            )
        return _check_source(Statistics.load(Path(calibration)), source, calibration)
    check_calibration(calibration)
    return None


def _identity(checkpoint: Checkpoint) -> str:
    """Return hexadecimal digits that identify the weights of a model, which copies of it have too.

    Of every tensor the first elements count, which any training changes.
    """
    digest = hashlib.sha256()
    for name in sorted(checkpoint):
        spec = checkpoint.spec(name)
        digest.update(f"{name} {spec.dtype} {spec.shape}".encode())
        for _, piece in itertools.islice(checkpoint.stream(name), 1):
            digest.update(piece[:_SAMPLED].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:SOURCE_DIGITS]


def _reused(file: Path, run: str, work: Path | None) -> Statistics:
    """Return the statistics that an earlier run of the same command saved before it was killed."""
    if read_run(file) != run[:RUN_DIGITS]:
        raise InvalidInput(f"--save-statistics {file} exists and nothing is overwritten; name another file")
    notice(f"{file} holds the statistics of this very command, and is used as it is")
    return _loaded(file, work)


def _loaded(file: Path, work: Path | None) -> Statistics:
    """Return saved statistics that do not need their file any more."""
    statistics = Statistics.load(file)
    if file.stat().st_size < free_bytes():
        return replace(statistics, layers=tuple(layer.copied() for layer in statistics.layers))
    return replace(statistics, layers=tuple(layer.parked(_place(work)) for layer in statistics.layers))


def _own_text(
    source: Source,
    model: Any,
    need: Need,
    chosen: bool,
    *,
    sequences: int,
    length: int,
    seed: int,
    kept: WrittenBatches | None,
) -> tuple[Tensor, int | None]:
    """Return text that the source writes, up to where its predictions break down, and where that is.

    The text is cut only where its length was `chosen` by kvfold.
    """
    bos, eos = (source.config.get(f"{end}_token_id") for end in ("bos", "eos"))
    with _running(model, need, sequences, length, source.positions) as (whole, batch):
        how: dict[str, Any] = {"sequences": sequences, "length": length, "bos": bos, "seed": seed}
        text = write_text(whole, **how, batch_size=batch, kept=kept)
        broken = reach_of(text.tokens_BT, text.entropy_BT, whole, source.positions)
    end, used = None, length
    if broken is not None:
        end, sign = broken
        found = f"the source's own text breaks down from position {end} on, where {sign}"
        if end >= length:
            notice(
                f"the source predicts its own text much worse after {end} tokens; greater distances are left "
                "out, unless --context asks for them"
            )
        elif not chosen:
            notice(
                f"{found}; it was probably trained on {end} tokens: leave out --length {length}, or use less"
            )
        else:
            notice(
                f"{found}; calibration sequences have {end} tokens, not {length} (--length overrides this)"
            )
            used = end
    return packed(text.tokens_BT[:, :used].contiguous(), eos[0] if isinstance(eos, list) else eos, seed), end


@contextmanager
def _running(
    model: Any, need: Need, sequences: int, length: int, positions: int
) -> Iterator[tuple[Any, int]]:
    """Yield a source that runs whole, and how many sequences it writes at once: as many as fit next to it."""
    from ...models.fused_attention import fused

    if not isinstance(model, LayeredModel):
        with fused(model):
            yield model, need.fitting_sequences(need.weights, sequences, loaded=True)
        return
    batch = need.fitting_sequences(need.layer + need.rest, sequences)
    kept = need.fitting_layers(batch)
    times = -(-sequences // batch) * length + readings(sequences, length, positions)
    notice(
        f"the source is larger than memory and writes {sequences} sequences of its own: "
        f"{len(model.blocks) - kept} of its "
        f"{len(model.blocks)} layers are read {times} times; on a text (--calibration FILE) they would be "
        f"read twice"
    )
    with model.streamed(kept) as whole:
        yield whole, batch


def layout_of(source: Source) -> Layout:
    """Return where the quantities of a source are in its transformers model."""
    # A checkpoint of the bare model leaves the prefix out; the module has it all the same.
    prefix = family_of(source.checkpoint.config).prefix

    def row(layer: int) -> Family:
        return replace(source.shape(layer).family, prefix=prefix)

    if source.family.latent:
        return _latent_layout(source, prefix)

    def heads(layer: int, role: str, output_BTC: Tensor) -> dict[str, Tensor]:
        family, geometry, order_H = row(layer), source.shape(layer).geometry, source.order_of(layer)
        output_CBT = output_BTC.movedim(-1, 0)
        rows: tuple[Tensor, ...] = (output_CBT.unflatten(0, (-1, geometry.head_dim)),)
        if role == "qkv":
            rows = split(output_CBT, family, geometry)
        elif role == "q":
            rows = (split_queries(output_CBT, family, geometry)[0],)
        found = dict(zip(role, rows, strict=True))
        if role == "k" and family.v is None:  # keys are values too, and have the gradient of both
            found["v"] = found["k"]
        return {
            one: (rows_IHBT if one == "v" else rows_IHBT[:, order_H]).permute(2, 3, 0, 1)
            for one, rows_IHBT in found.items()
        }

    return Layout(
        projections=lambda layer: row(layer).projections(layer), split=heads, layers=source.attending
    )


def _latent_layout(source: Source, prefix: str) -> Layout:
    """Return the same where attention is latent already.

    Keys and values are linear functions of the latent behind its norm, which has the gradient of both. So it
    takes the place of each, as one head.
    """
    family = replace(source.family, prefix=prefix)

    def projections(layer: int) -> dict[str, str]:
        names = family.projections(layer)
        place = names["o"].removesuffix("o_proj")
        return {"x": f"{place}kv_a_proj_with_mqa", "kv": f"{place}kv_a_layernorm", **names}

    def parts(layer: int, role: str, output_BTC: Tensor) -> dict[str, Tensor]:
        if role == "q":
            return {"q": output_BTC.unflatten(-1, (-1, source.geometry.head_dim))}
        return dict.fromkeys("kv", output_BTC[:, :, None]) if role == "kv" else {}

    return Layout(projections=projections, split=parts, layers=source.attending)


def _check_source(statistics: Statistics, source: Source, file: str) -> Statistics:
    """Return the statistics, or refuse those of another model."""
    for at, layer in enumerate(source.attending[: len(statistics.layers)]):
        geometry = source.shape(layer).geometry
        found = (len(statistics.layers), *statistics.layers[at].sizes())
        sizes = (geometry.hidden_size, geometry.num_attention_heads, geometry.key_width, geometry.head_dim)
        if found != (len(source.attending), *sizes):
            raise InvalidInput(
                f"{file} holds statistics of a model with (layers, hidden_size, heads, width of all keys, "
                f"head_dim) {found}, the source has {(len(source.attending), *sizes)}"
            )
    if not statistics.source:
        notice(f"{file} does not name the model of its statistics; they are taken as the source's")
    elif statistics.source != _identity(source.checkpoint):
        raise InvalidInput(
            f"{file} holds statistics of another model than {source.checkpoint.directory}, whose weights "
            "differ; collect them again with --save-statistics"
        )
    ids_BT, vocabulary = statistics.ids_BT, source.config["vocab_size"]
    if int(ids_BT.max()) >= vocabulary:
        raise InvalidInput(
            f"{file} holds the token id {int(ids_BT.max())}, but the source has {vocabulary} embeddings; "
            "collect the statistics again"
        )
    return statistics
