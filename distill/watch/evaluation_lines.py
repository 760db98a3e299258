"""The lines of evaluations.jsonl, read back when a run resumes or ends."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError

from ...core.errors import InvalidInput
from ...core.type_adapters import type_adapter
from ...core.untrusted import printable
from .metrics import read_lines

_Perplexity = Annotated[float, Field(gt=0)]


class _FinitePart:
    __pydantic_config__: ClassVar = {"allow_inf_nan": False}


@dataclass(frozen=True)
class _TeacherPart(_FinitePart):
    perplexity: _Perplexity
    window_nll: list[float]


@dataclass(frozen=True)
class _EvaluationLine(_FinitePart):
    step: int
    stage: str
    tokens: int
    perplexity: _Perplexity
    kl: float
    same_top1: float
    window_nll: list[float]
    recovered_share: float | None


@dataclass(frozen=True)
class _StartLine(_EvaluationLine):
    teacher: _TeacherPart
    text: str
    text_sha256: str


def read_evaluations(file: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run so far, the one before any training first; none if there is no file.

    Args:
        file: evaluations.jsonl.

    Raises:
        InvalidInput: a line is damaged, or numbers of windows differ.
    """
    lines = read_lines(file)
    remedy = f"remove {file.parent} to start over"
    for number, line in enumerate(lines):
        kind = _EvaluationLine if number else _StartLine
        try:
            # As JSON, so that the strict types take objects and lists.
            type_adapter(kind).validate_json(json.dumps(line), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = printable(".".join(map(str, first["loc"])))[:100]
            raise InvalidInput(
                f"{file} is damaged in line {number + 1} ({place}: {first['msg']}); {remedy}"
            ) from None
    counts = {len(line["window_nll"]) for line in lines} | {
        len(line["teacher"]["window_nll"]) for line in lines[:1]
    }
    if len(counts) > 1:
        raise InvalidInput(f"{file} is damaged: its lines have different numbers of windows; {remedy}")
    return lines
