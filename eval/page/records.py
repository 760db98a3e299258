"""A checkpoint's directory as data: eval.json and eval-*.json, kvfold.json, metrics.jsonl and curve.json.

The files are read without importing the code that wrote them, so a page needs no torch. Keys that a page does
not show are ignored.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ...checkpoints.cost_blocks import CacheBlock
from ...checkpoints.eval_json import FILE, EvalReport, parsed, read_json, read_report
from ...checkpoints.record import FILE as RECORD
from ...checkpoints.record import read_record
from ...core.errors import InvalidInput
from ...core.untrusted import read_json_lines

EXTRA = "eval-*.json"  # suites that were measured later: a report is never overwritten
_REMEDY = "move it away and make it again"
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class FilePart(BaseModel):
    """A part of kvfold.json or curve.json."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class LayerSpectrum(FilePart):
    """The cost of leaving out each direction of a layer's keys and values, by its number from 1."""

    size: Count
    index: tuple[Count, ...]
    cost: tuple[float, ...]


class RecordedLayer(FilePart):
    """A layer of a fold: its planned loss, and its loss measured alone, nats per token."""

    planned: dict[str, float] | None = None
    measured: dict[str, float] | None = None
    spectrum: LayerSpectrum | None = None


class TrainingPoint(FilePart):
    """An evaluation during training."""

    tokens: int
    perplexity: Positive


class TrainingCurve(FilePart):
    """The content of curve.json."""

    text: str
    teacher_perplexity: Positive
    points: tuple[TrainingPoint, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Found:
    """A checkpoint and all that its directory says of it.

    Attributes:
        directory: the checkpoint.
        label: its name on the page.
        report: eval.json, with the suites of eval-*.json.
        record: kvfold.json; None for a checkpoint that kvfold did not write.
        layers: layers of the fold.
        losses: tokens trained on and KL on the training batch, nats per token, of logged steps.
        curve: evaluations during training.
        formats: those of eval-*.json whose cache was stored in another number format than that of eval.json.
    """

    directory: Path
    label: str
    report: EvalReport
    record: dict[str, Any] | None
    layers: tuple[RecordedLayer, ...]
    losses: tuple[tuple[int, float], ...]
    curve: TrainingCurve | None
    formats: tuple[EvalReport, ...] = ()

    @property
    def cache_ratio(self) -> float | None:
        """The size of its cache relative to the source's, as measured, or else by kvfold.json."""
        measured = self.report.block("cache", CacheBlock)
        if measured is not None and measured.ratio is not None:
            return measured.ratio
        cache = (self.record or {}).get("cache")
        return cache.get("ratio") if isinstance(cache, dict) else None

    @property
    def target(self) -> Mapping[str, Any]:
        """The target of the fold; empty for a checkpoint that kvfold did not fold."""
        target = (self.record or {}).get("target")
        return target if isinstance(target, dict) else {}

    @property
    def rounded(self) -> Mapping[str, Any]:
        """The record of `kvfold quantize`; empty for a checkpoint that something else wrote last."""
        record = self.record or {}
        return (record.get("quantize") or {}) if record.get("stage") == "quantize" else {}

    @property
    def commands(self) -> list[str]:
        """The recorded commands that made it."""
        made = (self.record or {}).get("command"), self.rounded.get("command")
        return [command for command in made if command]


def read_found(directory: Path, label: str) -> Found:
    """Read a checkpoint's directory.

    Raises:
        InvalidInput: there is no such directory, it has no eval.json, or one of its files is damaged or
            belongs to another checkpoint.
    """
    if not directory.is_dir():
        raise InvalidInput(
            f"{directory} is not a directory; name the directory of a checkpoint with an {FILE}"
        )
    if not (directory / FILE).is_file():
        raise InvalidInput(
            f"{directory} has no {FILE}; measure it: {command(directory, '--text stdlib', FILE)}"
        )
    report = read_report(directory / FILE, directory)
    formats = []
    for extra in sorted(directory.glob(EXTRA)):
        more = read_report(extra, directory)
        if more.checkpoint.identity != report.checkpoint.identity:
            raise InvalidInput(
                f"{extra} was measured on other weights than {directory / FILE}; move the older file away"
            )
        if report.protocol and more.protocol and report.protocol != more.protocol:
            raise InvalidInput(
                f"{extra} was measured on another text than {directory / FILE}, or in other windows; move "
                f"it away"
            )
        if more.cache_dtype == report.cache_dtype:
            suites = dict(report.suites)
            for name, block in more.suites.items():
                if suites.get(name) is None:
                    suites[name] = block
            report = replace(
                report,
                suites=suites,
                protocol=report.protocol or more.protocol,
                teacher=report.teacher or more.teacher,
            )
        else:
            formats.append(more)
    record, curve = read_record(directory), directory / "curve.json"
    layers = (record or {}).get("layers", [])
    return Found(
        directory=directory,
        label=label,
        report=report,
        record=record,
        layers=parsed(tuple[RecordedLayer, ...], layers, directory / RECORD, _REMEDY, ("layers",)),
        losses=_read_losses(directory / "metrics.jsonl"),
        curve=parsed(TrainingCurve, read_json(curve, _REMEDY), curve, _REMEDY) if curve.is_file() else None,
        formats=tuple(formats),
    )


def command(directory: Path, options: str, file: str) -> str:
    """Return the command that measures a checkpoint."""
    return f"kvfold eval {shlex.quote(str(directory))} {options} --out {shlex.quote(str(directory / file))}"


def _read_losses(path: Path) -> tuple[tuple[int, float], ...]:
    if not path.is_file():
        return ()
    found = []
    for values in read_json_lines(path, "move it away"):
        loss, tokens = values.get("kl", values.get("forward_kl")), values.get("tokens")
        if loss is None:
            continue
        if type(tokens) is not int or type(loss) not in {int, float} or not isfinite(loss):
            raise InvalidInput(
                f"{path} is damaged: tokens and losses of a training log are finite numbers; move it away"
            )
        found.append((tokens, float(loss)))
    return tuple(found)
