"""The one path of a fold: fold each layer's attention, copy everything else, rename the output.

Tensors go to planned offsets in `<out>.partial/model`; each is read once. Every layer is a job of its own on
one thread, so the bytes depend neither on the number of jobs nor on the number of processes. Memory is that
of the layers at work. A source file is hashed just before its tensors are read, which then come from the
system's cache.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial as bind
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.directory import Checkpoint, check_output, copy_side_files
from ...checkpoints.identity import check_unchanged, hash_unchanged
from ...checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint
from ...checkpoints.quantised.schemes import MODELOPT_FILE
from ...checkpoints.record import SCHEMA, describe, write_record
from ...checkpoints.shards import ShardWriter
from ...core.console import is_first, notice, progress
from ...core.disk import check_room, disk_error, is_full, writing_errors
from ...core.errors import InvalidInput
from ...core.files import check_makeable, write_json
from ...core.hub import commit_of
from ...core.memory import enough_memory
from ...core.processes import from_first, place, released_together, together, union
from ...core.version import __version__
from ...core.work import WRITTEN, WorkDir, claimed, joined, strangers, working_directory
from ..decide.plan import Plan, PlannedLayer
from ..layer.fold import fold
from ..layer.threads import FEWER, fold_threads
from ..methods import table as methods
from ..request import FoldRequest
from .joint_loss import measured_kl
from .model_card import write_card

_SYNC = 1.0  # seconds between two times that small units are forced to the disk
KIND = "fold"
RESULT = "model"  # the directory in the working one that becomes the output
Found = dict[str, Any]  # about a unit, as the journal and kvfold.json have it
Unit = Callable[[], Found]


@contextmanager
def begun(request: FoldRequest, out: Path, size: int) -> Iterator[Path]:
    """Claim the working directory of an output of `size` bytes while statistics are taken.

    Yields:
        A directory in it for what an interrupted run need not do again.

    Raises:
        InvalidInput: nothing can be made there, the disk is too small, another run is at work there, or what
            is next to it has finished layers of a fold with other options, or is not kvfold's.
    """
    path = working_directory(out)
    with ExitStack() as held:
        with together():
            if is_first():
                check_makeable(out)
                check_room(out, size, path)
                is_earlier = path.exists()  # a refusal leaves what is there, and text that was written
                work = held.enter_context(
                    claimed(path, KIND, keeps=lambda work: is_earlier or (path / WRITTEN).exists())
                )
                if work.request() is None:
                    work.begin(options_of(request))
                else:
                    work.check(options_of(request))
        yield path / WRITTEN


@enough_memory(FEWER)
def rewrite(plan: Plan, out: Path, *, source_name: str | None = None) -> dict[str, Any]:
    """Carry out a plan; of several processes each its share, on any machines that see the same directories.

    The plan's request says how large a shard may be, and how many layers are at work at once, each on one
    thread (`Folding.jobs`).

    Args:
        plan: what to do.
        out: the output directory; it appears only when complete, and must not exist.
        source_name: name of the source in the record; by default its Hub id, or its directory's name.

    Returns:
        The record in the output's kvfold.json.

    Raises:
        InvalidInput: `out` exists or cannot be written, the disk or memory is too small, or a weight is NaN
            or infinite.
    """
    with together():
        check_output(out, plan.source.checkpoint.directory)
        about = plan.method, plan.target, plan.source.rotary_width
        methods.check_calibrated(*about, calibrated=plan.statistics is not None, biased=plan.folds_biases)
        if plan.container.kind == "stock" and plan.source.norms and plan.statistics is None:
            raise InvalidInput(
                "norms of queries and keys can be replaced for the stock class by statistics only; use "
                "--calibration self, or --container remote"
            )
    with ExitStack() as first:
        work = None
        with together():
            if is_first():
                work = first.enter_context(claimed(working_directory(out), KIND))
        done = _share(plan, out, work)
        record = _record(plan, source_name or plan.request.source_name, done)
        if work is not None:
            with _failures(plan, out):
                record = _complete(plan, work.path / RESULT, record)
                # The output could hold weights of two sources.
                check_unchanged(plan.source.checkpoint, _hashes(plan, done))
                work.finish(work.path / RESULT, out)
    return record


def options_of(request: FoldRequest) -> dict[str, Any]:
    """Return the options of a request, for the comparison with a later one."""
    names = {"model": "the source", "engines": "--engine"}
    return {
        names.get(name, f"--{name.replace('_', '-')}"): value for name, value in request.essentials().items()
    }


def _share(plan: Plan, out: Path, work: WorkDir | None) -> dict[str, Found]:
    """Write this process's share of the tensors, and return what all processes found.

    Only rank 0 has `work`, which it has claimed.
    """
    rank, ranks = place()
    shard_size, jobs = plan.request.shard_size, plan.jobs
    fingerprint = plan.fingerprint(shard_size)
    specs = plan.specs
    done: dict[str, Found] = {}
    agreed = from_first(fingerprint)
    with released_together(), ExitStack() as own:
        with together(), _failures(plan, out):
            if fingerprint != agreed:
                raise InvalidInput(
                    "the processes do not see the same source; give them one directory that they all share"
                )
            if work is not None:
                work.begin(options_of(plan.request), fingerprint)
                result = work.path / RESULT
                result.mkdir(exist_ok=True)
                for path in result.iterdir():  # a source may have lost files that an earlier run copied
                    if path.suffix != ".safetensors" and not any(strangers(path)):
                        path.unlink()
                writer = own.enter_context(ShardWriter(result, specs, shard_size))
                work.restart(_intact(work.units, writer) if writer.resumed else {})
                done = work.units
        done = from_first(done)
        with together(), _failures(plan, out):
            if work is None:
                work = own.enter_context(joined(working_directory(out), KIND, rank))
                work.begin(options_of(plan.request), fingerprint)
                writer = own.enter_context(ShardWriter(work.path / RESULT, specs, shard_size, allocate=False))
            units = [(name, unit) for name, unit in _units(plan, writer) if name not in done]
            _work(dict(units[rank::ranks]), writer, work, jobs)
    return done | union(work.units)


def _intact(done: Mapping[str, Found], writer: ShardWriter) -> dict[str, Found]:
    """Return the finished units whose bytes are as they were written, and report if there are others."""
    written = {name: found.get("checksums", {}) for name, found in done.items()}
    kept = {name: done[name] for name, sums in written.items() if writer.checksums(sums) == sums}
    if changed := len(done) - len(kept):
        notice(
            f"{changed} of {len(done)} finished parts of the half-written output have changed since they "
            "were written, and are written again"
        )
    return kept


def _work(units: dict[str, Unit], writer: ShardWriter, work: WorkDir, jobs: int) -> None:
    """Run some units on `jobs` threads, and record those that are on the disk in the journal."""
    found: dict[str, Found] = {}
    synced = time.monotonic()

    def record() -> None:
        writer.sync()
        work.add(found)
        found.clear()

    def finished(names: dict[Future[Found], str]) -> Iterator[str]:
        nonlocal synced
        for future in as_completed(names):
            name = names[future]
            found[name] = future.result()
            if _is_layer(name) or time.monotonic() - synced > _SYNC:  # a layer is worth the wait
                record()
                synced = time.monotonic()
            yield name
        record()

    # Copies take next to no time and come behind the layers of their file: counted, they would multiply the
    # time that is said to be left.
    layers = sum(map(_is_layer, units))
    with fold_threads(jobs) as pool:
        names = {pool.submit(unit): name for name, unit in units.items()}
        for _ in progress(filter(_is_layer, finished(names)), "fold", layers, jobs):
            pass


def _is_layer(name: str) -> bool:
    return name.startswith("layer ")


def _units(plan: Plan, writer: ShardWriter) -> list[tuple[str, Unit]]:
    """Return the units of a plan, in the order of the files that it is read from."""
    checkpoint = plan.source.checkpoint
    units: dict[Path, list[tuple[str, Unit]]] = {
        file: [(f"file {file.name}", bind(_hash, checkpoint, file))] for file in checkpoint.files
    }
    for layer in plan.layers:
        file = checkpoint.file_of(layer.reads[0])
        units[file].append((f"layer {layer.number}", bind(_write_layer, plan, layer, writer)))
    for name, copy in plan.copies.items():
        units[checkpoint.file_of(copy.source)].append((name, bind(_copy, plan, name, writer)))
    return list(chain.from_iterable(units.values()))


def _hash(checkpoint: Checkpoint, file: Path) -> Found:
    return {"sha256": hash_unchanged(checkpoint, file)}


def _hashes(plan: Plan, done: dict[str, Found]) -> dict[str, str]:
    return {file.name: done[f"file {file.name}"]["sha256"] for file in plan.source.checkpoint.files}


def _write_layer(plan: Plan, layer: PlannedLayer, writer: ShardWriter) -> Found:
    """Write a layer's attention; its loss, where it was measured, and its spectrum."""
    folded = fold(plan, layer.number)
    for name, tensor in folded.tensors.items():
        writer.write(name, tensor)
    return {
        "measured": folded.loss,
        "spectrum": folded.spectrum and asdict(folded.spectrum),
        "checksums": writer.checksums(folded.tensors),
    }


def _copy(plan: Plan, name: str, writer: ShardWriter) -> Found:
    copy, checkpoint = plan.copies[name], plan.source.checkpoint
    if copy.part is not None:
        assert isinstance(checkpoint, QuantisedCheckpoint)
        for first, piece in checkpoint.stored.stream(copy.part):
            writer.write(name, piece, first)
    elif copy.change is not None and not copy.by_rows:
        writer.write(name, copy.change(checkpoint[copy.source].to(torch.float64)))
    else:
        for first, piece in checkpoint.stream(copy.source, copy.by_rows):
            changed = piece
            if copy.change is not None:
                rows = piece.to(torch.float64).unflatten(0, (-1, copy.spec.shape[-1]))
                changed = copy.change(rows).flatten()
            writer.write(name, changed, first)
    return {"checksums": writer.checksums([name])}


def _complete(plan: Plan, partial: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write the files next to the weights; return the record as it is written."""
    checkpoint, modules = plan.source.checkpoint, plan.modules
    copy_side_files(checkpoint.directory, partial)
    for file in plan.container.files:
        shutil.copyfile(file, partial / file.name)
    write_json(partial / "config.json", plan.config)
    if modules is not None and isinstance(checkpoint, QuantisedCheckpoint):
        content = checkpoint.modelopt_file_for(modules)
        if content is not None:  # the second place of ModelOpt's configuration
            write_json(partial / MODELOPT_FILE, content)
    measured = measured_kl(plan, partial)
    record = write_record(partial, record if measured is None else {**record, "measured_kl": measured})
    write_card(partial, record)
    return record


@contextmanager
def _failures(plan: Plan, out: Path) -> Iterator[None]:
    try:
        yield
    except writing_errors() as error:
        of_disk = disk_error(error, out)
        if of_disk is not None and is_full(of_disk):
            need = sum(spec.nbytes for spec in plan.specs.values())
            raise InvalidInput(
                f"cannot write {out}: no space left, the output takes {need:,} bytes; the half-written "
                "output was removed: make room there and run the same command again"
            ) from None
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or error
        raise InvalidInput(f"cannot write {out}: {reason}; the half-written output was removed") from None


def _record(plan: Plan, source_name: str | None, done: dict[str, Found]) -> dict[str, Any]:
    found = [done[f"layer {layer.number}"] for layer in plan.layers]
    found = [{field: layer[field] for field in ("measured", "spectrum")} for layer in found]
    losses = [layer["measured"] for layer in found]
    directory, dtype = plan.source.checkpoint.directory, plan.request.cache_dtype
    prepared: dict[str, Any] = {}
    notices = list(plan.notices)
    if dtype != "bfloat16":
        prepared["name"] = dtype
        if all(losses):
            prepared["predicted_loss"] = sum(loss["stored"] for loss in losses)
            prepared["unprepared"] = sum(loss["unprepared"] for loss in losses)
    numbers = [str(layer.number) for layer, loss in zip(plan.layers, losses, strict=True) if loss is None]
    if prepared and plan.latent_norm == "fitted" and numbers:
        # Behind a fitted norm coordinates are fitted to samples, and these layers have none.
        notices.append(
            f"layers {', '.join(numbers)} are not prepared for a cache in {dtype}: their norm is fitted, and "
            "their loss cannot be measured on calibration text; --latent-norm linear prepares them by their "
            "weights"
        )
    return {
        "schema": SCHEMA,
        "kvfold": __version__,
        "stage": "convert",
        "command": plan.request.command,
        "request": plan.request.essentials(),
        "source": describe(directory, source_name, commit_of(directory), _hashes(plan, done)),
        "target": plan.target.to_dict(),
        "method": plan.method,
        "calibration": plan.calibration(),
        # Summed over the layers, each measured alone on calibration text; where that could not be, as
        # planned.
        "predicted_loss": sum(loss["refined"] for loss in losses) if all(losses) else plan.predicted,
        **({"cache_dtype": prepared} if prepared else {}),
        "layers": [{"planned": planned, **layer} for planned, layer in zip(plan.losses, found, strict=True)],
        "container": plan.config["architectures"][0],
        **({} if plan.latent_norm is None else {"latent_norm": plan.latent_norm}),
        "engines": list(plan.engines),
        "dtype": plan.config["dtype"],
        "cache": plan.cache(),
        "notices": notices,
        "parents": [{"stage": "source", "path": str(directory.resolve())}],
    }
