"""The one path of a conversion: read a layer's attention, fold it, write it; copy everything else; then give it its name.

Tensors go to planned offsets in `<out>.partial`, each read once, with at most one layer's attention in memory. A journal there
says what is done, so that the same command goes on after a kill; any other plan starts clean.
"""

import errno
import fcntl
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from . import methods
from .card import SCHEMA, describe, write_record
from .checkpoint import check_output, copy_side_files, finish
from .console import progress
from .containers.remote import Remote
from .errors import InvalidInput
from .fold import Loss, fold
from .hub import commit_of
from .plan import Layer, Plan
from .shards import SHARD_SIZE, ShardWriter
from .target import MLA

JOURNAL = "journal.jsonl"


def rewrite(
    plan: Plan, out: Path, command: str, shard_size: int = SHARD_SIZE, source_name: str | None = None
) -> dict[str, Any]:
    """Carry out a plan.

    Args:
        plan: what to do.
        out: the output directory; it appears only when complete, and must not exist.
        command: how a user would ask for the same, for the record.
        shard_size: bytes a shard at most holds.
        source_name: what the source is called; its directory's name by default.

    Returns:
        The record that is in the output's kvfold.json.

    Raises:
        InvalidInput: `out` exists or cannot be written, the disk is too small, or a weight is NaN or infinite.
    """
    check_output(out, plan.source.checkpoint.directory)
    slots = plan.target.slots if isinstance(plan.target, MLA) else None
    methods.check_calibrated(plan.method, slots, calibrated=plan.statistics is not None)
    partial = out.with_name(out.name + ".partial")
    with _failures(plan, out), _journal(partial, plan.fingerprint(shard_size)) as (journal, done):
        with ShardWriter(partial, plan.specs, shard_size) as writer:
            done = done if writer.resumed else {}
            for unit in progress(_units(plan), "fold", len(plan.layers) + len(plan.copies)):
                name = unit if isinstance(unit, str) else f"layer {unit.number}"
                if name in done:
                    continue
                done[name] = _write_unit(plan, unit, writer)
                writer.sync()
                journal.write(json.dumps([name, done[name]]) + "\n")
                journal.flush()
        copy_side_files(plan.source.checkpoint.directory, partial)
        if isinstance(plan.container, Remote):
            for file in plan.container.files:
                shutil.copyfile(file, partial / file.name)
        (partial / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
        losses = [done[f"layer {layer.number}"] for layer in plan.layers]
        record = _record(plan, command, source_name, losses)
        write_record(partial, record)
        (partial / JOURNAL).unlink()
        finish(partial, out)
    return record


def _units(plan: Plan) -> Iterator[Layer | str]:
    """What is written one after another: a layer's attention, or another output tensor."""
    yield from plan.layers
    yield from plan.copies


def _write_unit(plan: Plan, unit: Layer | str, writer: ShardWriter) -> Loss | None:
    """Write a unit; a layer's loss, where it was measured."""
    if isinstance(unit, str):
        _write_copy(plan, unit, writer)
        return None
    folded = fold(plan, unit.number)
    for name, tensor in folded.tensors.items():
        writer.write(name, tensor)
    return folded.loss


def _write_copy(plan: Plan, name: str, writer: ShardWriter) -> None:
    copy, checkpoint = plan.copies[name], plan.source.checkpoint
    if copy.change is not None and not copy.by_rows:
        writer.write(name, copy.change(checkpoint[copy.source].to(torch.float64)))
        return
    for first, piece in checkpoint.stream(copy.source, copy.by_rows):
        changed = piece
        if copy.change is not None:
            changed = copy.change(piece.to(torch.float64).unflatten(0, (-1, copy.spec.shape[-1]))).flatten()
        writer.write(name, changed, first)


@contextmanager
def _journal(partial: Path, fingerprint: str) -> Iterator[tuple[IO[str], dict[str, Loss | None]]]:
    """The journal of a half-written output, and the units that are done, with losses; another's leftovers are removed.

    A kill leaves the directory for the next run; an error that a rerun would meet again removes it.

    Raises:
        InvalidInput: another process is writing there, or the directory is somebody else's.
    """
    partial.mkdir(parents=True, exist_ok=True)
    if {path.name for path in partial.iterdir()} - {JOURNAL} and not _is_ours(partial / JOURNAL):
        raise InvalidInput(f"{partial} exists and is no half-written output of kvfold; move it, or name another --out")
    with (partial / JOURNAL).open("a+", encoding="utf-8") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(f"another kvfold is writing {partial}; wait for it or name another --out") from None
        journal.seek(0)
        # A kill may have cut the last line short: what it names is done again.
        lines = [line for line in journal.read().splitlines(keepends=True) if line.endswith("\n")]
        if lines[:1] != [json.dumps(fingerprint) + "\n"]:
            lines = [json.dumps(fingerprint) + "\n"]
            for path in partial.iterdir():
                if path.name != JOURNAL:
                    path.unlink()
        journal.seek(0)
        journal.truncate()
        journal.writelines(lines)
        journal.flush()
        try:
            yield journal, dict(map(json.loads, lines[1:]))
        except (OSError, InvalidInput):
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _is_ours(journal: Path) -> bool:
    """Whether a directory holds a journal that begins with a plan's fingerprint."""
    return (
        journal.is_file() and re.match(r'"[0-9a-f]{64}"\n', journal.read_text(encoding="utf-8", errors="replace")) is not None
    )


@contextmanager
def _failures(plan: Plan, out: Path) -> Iterator[None]:
    """The file system's errors as sentences."""
    try:
        yield
    except OSError as error:
        need = sum(spec.nbytes for spec in plan.specs.values())
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        reason = f"no space left, the output takes {need:,} bytes" if full else str(error.strerror or error)
        raise InvalidInput(f"cannot write {out}: {reason}; the half-written output was removed") from None


def _record(plan: Plan, command: str, source_name: str | None, losses: list[Loss | None]) -> dict[str, Any]:
    from .. import __version__

    directory = plan.source.checkpoint.directory
    parent = {"stage": "source", "path": str(directory.resolve())}
    return {
        "schema": SCHEMA,
        "kvfold": __version__,
        "stage": "convert",
        "command": command,
        "source": describe(directory, source_name, commit_of(directory)),
        "target": plan.target.to_dict(),
        "method": plan.method,
        "calibration": plan.calibration(),
        # Summed over the layers, each measured alone on calibration text; where that could not be, as planned.
        "predicted_loss": sum(loss["refined"] for loss in losses if loss) if all(losses) else plan.predicted,
        "layers": [{"planned": planned, "measured": loss} for planned, loss in zip(plan.losses, losses, strict=True)],
        "container": plan.config["architectures"][0],
        "dtype": plan.config["dtype"],
        "cache": plan.cache(),
        "notices": list(plan.notices),
        "parents": [parent],
    }
