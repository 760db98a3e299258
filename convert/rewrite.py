"""The one path of a conversion: read a layer's attention, fold it, write it; copy everything else; then give it its name.

Tensors go to planned offsets in `<out>.partial`, each read once, with at most one layer's attention in memory. A journal there
says what is done, so that the same command goes on after a kill; any other plan starts clean.
"""

import errno
import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from . import methods
from .attention import Attention
from .card import SCHEMA, describe, write_record
from .checkpoint import check_output, copy_side_files, finish
from .console import progress
from .containers.stock import Stock
from .errors import InvalidInput
from .factor import uniform_bands
from .hub import commit_of
from .metric import weights_only
from .plan import Layer, Plan, slot_frequencies
from .rotary import frequencies, rope_parameters
from .shards import ShardWriter
from .target import MLA

JOURNAL = "journal.jsonl"


def rewrite(plan: Plan, out: Path, command: str, shard_size: int, source_name: str | None = None) -> dict[str, Any]:
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
    check_output(out)
    partial = out.with_name(out.name + ".partial")
    with _failures(plan, out), _journal(partial, plan.fingerprint()) as (journal, done):
        with ShardWriter(partial, plan.specs, shard_size) as writer:
            for unit in progress(_units(plan), "fold", len(plan.layers) + len(plan.copies)):
                name = unit if isinstance(unit, str) else f"layer {unit.number}"
                if name in done:
                    continue
                _write_unit(plan, unit, writer)
                writer.sync()
                journal.write(json.dumps(name) + "\n")
                journal.flush()
        copy_side_files(plan.source.directory, partial)
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
        for first, piece in plan.source.stream(unit):
            writer.write(unit, piece, first)
    else:
        for name, tensor in fold(plan, unit).items():
            writer.write(name, tensor)


def fold(plan: Plan, layer: Layer) -> dict[str, Tensor]:
    """One layer's output tensors, float64, by name: the only place where weights meet a method."""
    attention = read_attention(plan, layer.number)
    config = plan.source.config
    metric = weights_only(attention, config["max_position_embeddings"])
    if isinstance(plan.container, Stock):
        target = plan.container.target
        table_F, _ = frequencies(rope_parameters(config), plan.geometry.head_dim, config["max_position_embeddings"])
        bands = uniform_bands(table_F, slot_frequencies(config, plan.geometry, target))
        latent = methods.FACTOR[plan.method](attention, target, table_F, bands, metric)
        return plan.container.tensors(latent, layer.number)
    return plan.container.tensors(methods.POOL[plan.method](attention, plan.container.target, metric), layer.number)


def read_attention(plan: Plan, layer: int) -> Attention:
    """One layer's attention of the source, float64."""
    head_dim = plan.geometry.head_dim

    def read(role: str, part: str) -> Tensor | None:
        name = f"{plan.family.projections(layer)[role]}.{part}"
        return plan.source[name].to(torch.float64) if name in plan.source else None

    def heads(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.unflatten(0, (-1, head_dim))

    output = read("o", "weight")
    assert output is not None
    gain = 1.0
    if isinstance(plan.target, MLA):
        config = plan.source.config
        _, gain = frequencies(rope_parameters(config), head_dim, config["max_position_embeddings"])
    return Attention(
        q_NHD=heads(read("q", "weight")),
        k_KHD=heads(read("k", "weight")),
        v_KHD=heads(read("v", "weight")),
        o_DNH=output.unflatten(1, (-1, head_dim)),
        q_NH=heads(read("q", "bias")),
        k_KH=heads(read("k", "bias")),
        v_KH=heads(read("v", "bias")),
        o_D=read("o", "bias"),
        scale=head_dim**-0.5 * gain**2,
    )


@contextmanager
def _journal(partial: Path, fingerprint: str) -> Iterator[tuple[IO[str], set[str]]]:
    """The journal of a half-written output, and the units that are done; another plan's leftovers are removed first.

    A kill leaves the directory for the next run; an error that a rerun would meet again removes it.

    Raises:
        InvalidInput: another process is writing there.
    """
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / JOURNAL).open("a+", encoding="utf-8") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(f"another kvfold is writing {partial}; wait for it or name another --out") from None
        journal.seek(0)
        # A kill may have cut the last line short: what it names is done again.
        lines = [json.loads(line) for line in journal.read().splitlines(keepends=True) if line.endswith("\n")]
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


@contextmanager
def _failures(plan: Plan, out: Path) -> Iterator[None]:
    """The file system's errors as sentences."""
    try:
        yield
    except OSError as error:
        need = sum(spec.nbytes for spec in plan.specs.values())
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        reason = f"no space left, the output takes {need:,} bytes" if full else str(error.strerror or error)
        raise InvalidInput(f"cannot write {out}: {reason}; nothing was left behind") from None


def _record(plan: Plan, command: str, source_name: str | None) -> dict[str, Any]:
    from .. import __version__

    directory = plan.source.directory
    parent = {"stage": "source", "path": str(directory.resolve())}
    return {
        "schema": SCHEMA,
        "kvfold": __version__,
        "stage": "convert",
        "command": command,
        "source": describe(directory, source_name, commit_of(directory)),
        "target": plan.target.to_dict(),
        "method": plan.method,
        "calibration": "none",
        "container": plan.config["architectures"][0],
        "dtype": plan.config["dtype"],
        "cache": plan.cache(),
        "notices": list(plan.notices),
        "parents": [parent],
    }
