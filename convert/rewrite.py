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

from torch import Tensor

from . import methods
from .card import SCHEMA, describe, write_record
from .checkpoint import check_output, copy_side_files, finish
from .console import progress
from .containers.stock import Stock
from .errors import InvalidInput
from .hub import commit_of
from .plan import Layer, Plan
from .shards import SHARD_SIZE, ShardWriter
from .slots import metric_of

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
    partial = out.with_name(out.name + ".partial")
    with _failures(plan, out), _journal(partial, plan.fingerprint(shard_size)) as (journal, done):
        with ShardWriter(partial, plan.specs, shard_size) as writer:
            done = done if writer.resumed else set()
            for unit in progress(_units(plan), "fold", len(plan.layers) + len(plan.copies)):
                name = unit if isinstance(unit, str) else f"layer {unit.number}"
                if name in done:
                    continue
                _write_unit(plan, unit, writer)
                writer.sync()
                journal.write(json.dumps(name) + "\n")
                journal.flush()
        copy_side_files(plan.source.checkpoint.directory, partial)
        (partial / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
        record = _record(plan, command, source_name)
        write_record(partial, record)
        (partial / JOURNAL).unlink()
        finish(partial, out)
    return record


def _units(plan: Plan) -> Iterator[Layer | str]:
    """What is written one after another: a layer's attention, or a tensor that is copied."""
    yield from plan.layers
    yield from plan.copies


def _write_unit(plan: Plan, unit: Layer | str, writer: ShardWriter) -> None:
    if isinstance(unit, str):
        for first, piece in plan.source.checkpoint.stream(unit):
            writer.write(unit, piece, first)
    else:
        for name, tensor in fold(plan, unit).items():
            writer.write(name, tensor)


def fold(plan: Plan, layer: Layer) -> dict[str, Tensor]:
    """One layer's output tensors, float64, by name: the only place where weights meet a method."""
    source = plan.source
    if isinstance(plan.container, Stock):
        table_F, factor = source.frequencies()
        attention = source.attention(layer.number, factor)
        metric = metric_of(plan.statistics, layer.number, attention, source.positions)
        latent = methods.FACTOR[plan.method](attention, plan.container.target, table_F, plan.bands, metric)
        return plan.container.tensors(latent, layer.number)
    attention = source.attention(layer.number)
    metric = metric_of(None, layer.number, attention, source.positions)
    return plan.container.tensors(methods.POOL[plan.method](attention, plan.container.target, metric), layer.number)


@contextmanager
def _journal(partial: Path, fingerprint: str) -> Iterator[tuple[IO[str], set[str]]]:
    """The journal of a half-written output, and the units that are done; another plan's leftovers are removed first.

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
        lines = [line[1:-2] for line in journal.read().splitlines(keepends=True) if line.endswith('"\n')]
        if lines[:1] != [fingerprint]:
            lines = [fingerprint]
            for path in partial.iterdir():
                if path.name != JOURNAL:
                    path.unlink()
        journal.seek(0)
        journal.truncate()
        journal.writelines(json.dumps(line) + "\n" for line in lines)
        journal.flush()
        try:
            yield journal, set(lines[1:])
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


def _record(plan: Plan, command: str, source_name: str | None) -> dict[str, Any]:
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
        "predicted_loss": plan.predicted,
        "container": plan.config["architectures"][0],
        "dtype": plan.config["dtype"],
        "cache": plan.cache(),
        "notices": list(plan.notices),
        "parents": [parent],
    }
