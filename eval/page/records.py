"""What lies in a checkpoint's directory: eval.json and eval-*.json, kvfold.json, metrics.jsonl and
curve.json, as data.

Reports are read without importing what made them: a page needs no torch. What a page does not show is passed
over.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ...checkpoints.record import FILE as RECORD
from ...checkpoints.record import read_record
from ...core.errors import InvalidInput
from .blocks import SUITES, Caches, Curve, Layer, Part, Report

FILE = "eval.json"
EXTRA = "eval-*.json"  # suites that were measured later: a report is never overwritten
P = TypeVar("P", bound=Part)
T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """All that is known of a checkpoint.

    Attributes:
        directory: where it lies.
        label: what the page calls it.
        report: eval.json, with the suites of eval-*.json.
        record: kvfold.json; None for a checkpoint that kvfold did not make.
        layers: of the conversion.
        losses: tokens trained on and the KL on the training batch, nats a token, of logged steps.
        curve: evaluations during training.
    """

    directory: Path
    label: str
    report: Report
    record: dict[str, Any] | None
    layers: tuple[Layer, ...]
    losses: tuple[tuple[int, float], ...]
    curve: Curve | None

    @property
    def share(self) -> float | None:
        """Of the source's cache, measured or else by kvfold.json."""
        measured = self.suite("cache", Caches)
        if measured is not None and measured.ratio is not None:
            return measured.ratio
        cache = (self.record or {}).get("cache")
        return cache.get("ratio") if isinstance(cache, dict) else None

    @property
    def target(self) -> Mapping[str, Any]:
        """What it was folded to; empty for a checkpoint that kvfold did not fold."""
        target = (self.record or {}).get("target")
        return target if isinstance(target, dict) else {}

    def suite(self, name: str, kind: type[P]) -> P | None:
        """What a suite found; None where it was not measured or does not apply."""
        block = self.report.suites.get(name)
        return block if isinstance(block, kind) else None


def read_found(directory: Path, label: str) -> Found:
    """Read a checkpoint's directory.

    Args:
        directory: of the checkpoint.
        label: what to call it.

    Raises:
        InvalidInput: there is no such directory, nothing was measured of it, or a file in it is damaged or of
        another kind.
    """
    if not directory.is_dir():
        raise InvalidInput(f"{directory} is no directory; name that of a checkpoint, with its {FILE}")
    if not (directory / FILE).is_file():
        raise InvalidInput(
            f"{directory} has no {FILE}; measure it: {command(directory, '--text stdlib', FILE)}"
        )
    report = _read_report(directory / FILE, directory)
    for extra in sorted(directory.glob(EXTRA)):
        more = _read_report(extra, directory)
        if more.checkpoint.identity != report.checkpoint.identity:
            raise InvalidInput(
                f"{extra} was measured on other weights than {directory / FILE}; move the older one away"
            )
        if report.protocol and more.protocol and report.protocol != more.protocol:
            raise InvalidInput(
                f"{extra} was measured on another text than {directory / FILE}, or in other windows; move "
                f"it away"
            )
        report = _merged(report, more)
    record = read_record(directory)
    return Found(
        directory=directory,
        label=label,
        report=report,
        record=record,
        layers=_parsed(tuple[Layer, ...], (record or {}).get("layers", []), directory / RECORD),
        losses=_read_losses(directory / "metrics.jsonl"),
        curve=_read_curve(directory / "curve.json"),
    )


def command(directory: Path, options: str, file: str) -> str:
    """The command that measures a checkpoint."""
    return f"kvfold eval {shlex.quote(str(directory))} {options} --out {shlex.quote(str(directory / file))}"


def _merged(report: Report, more: Report) -> Report:
    """A report with the suites that only another has."""
    news = {name: block for name, block in more.suites.items() if report.suites.get(name) is None}
    protocol, teacher = report.protocol or more.protocol, report.teacher or more.teacher
    return report.model_copy(
        update={"suites": {**report.suites, **news}, "protocol": protocol, "teacher": teacher}
    )


def _read_report(path: Path, directory: Path) -> Report:
    content: Any = _read_json(path)
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != 2:
        raise InvalidInput(
            f"{path} is no report of schema 2 (its schema is {schema}); move it away and measure again"
        )
    report = _parsed(Report, content, path)
    measured = Path(report.checkpoint.path)
    if measured.is_dir() and measured.resolve() != directory.resolve():
        raise InvalidInput(
            f"{path} was measured on {measured}, not on {directory}; move it away and measure again"
        )
    blocks = {
        name: _parsed(SUITES[name], block, path)
        for name, block in report.suites.items()
        if name in SUITES and block is not None
    }
    return report.model_copy(update={"suites": blocks})


def _read_losses(path: Path) -> tuple[tuple[int, float], ...]:
    if not path.is_file():
        return ()
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
            loss = values.get("kl", values.get("forward_kl"))
            if loss is not None:
                found.append((int(values["tokens"]), float(loss)))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InvalidInput(
                f"{path} is damaged: it is not a record of training written by kvfold"
            ) from None
    return tuple(found)


def _read_curve(path: Path) -> Curve | None:
    return _parsed(Curve, _read_json(path), path) if path.is_file() else None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise InvalidInput(f"{path} is not valid JSON; move it away and measure again") from None


def _parsed(kind: type[T], content: Any, path: Path) -> T:
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidInput(
            f"{path} is not what kvfold writes ({place}: {first['msg']}); move it away and make it anew"
        ) from None
