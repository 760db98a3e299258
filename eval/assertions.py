"""`--assert`: comparisons of the report's numbers with bounds, so that a build can fail on them.

Importing this module loads nothing heavy.
"""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_type_hints

import click

from ..checkpoints.eval_json import BLOCKS, HEAD, EvalReport
from ..core.errors import InvalidInput
from ..core.settings import suggest
from .suites.catalogue import SUITES

# Short names of the numbers that are asked for most. Any other path may leave out `suites.`.
ALIASES = {
    "kl": "fidelity.kl.mean",
    "kl.mean": "fidelity.kl.mean",
    "kl.median": "fidelity.kl_percentiles.p50.mean",
    "kl.p90": "fidelity.kl_percentiles.p90.mean",
    "kl.p99": "fidelity.kl_percentiles.p99.mean",
    "kl.max": "fidelity.kl_max",
    "kl.added": "storage.kl.mean",
    "top1": "fidelity.same_top1.mean",
    "ppl": "ppl.student.perplexity",
    "ppl.ratio": "ppl.ratio.mean",
    "nll.difference": "ppl.difference.mean",
    "bits_per_byte": "ppl.student.bits_per_byte",
    "recovered": "ppl.recovered_share.value",
    "cache.ratio": "cache.ratio",
    "cache.elements": "cache.student.elements_per_token_per_layer",
}
# Numbers that are undefined without one of the models, by the beginnings of their paths.
_READ_FROM = {
    "teacher": ("fidelity", "ppl.teacher", "ppl.difference", "ppl.ratio", "ppl.recovered_share"),
    "parent": ("ppl.parent", "ppl.recovered_share"),
}
_OPERATORS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}
# The least and the greatest value of numbers, by their own key.
_RANGES = {
    **dict.fromkeys(("perplexity", "byte_perplexity", "word_perplexity"), (1, math.inf)),
    **dict.fromkeys(("nll", "bits_per_byte", "kl", "kl_percentiles", "kl_max", "ratio"), (0, math.inf)),
    "same_top1": (0, 1),
}
_FORM = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|==|<|>)\s*(\S+)\s*")


class Unmet(click.ClickException):
    """The failure of an assertion: exit code 3."""

    exit_code = 3


@dataclass(frozen=True)
class Assertion:
    """A path into the report, and the bound of its value.

    Attributes:
        text: as the user wrote it.
        path: from the report's root, e.g. `("suites", "fidelity", "kl", "mean")`.
        relation: a key of `_OPERATORS`.
        bound: the number on the right.
    """

    text: str
    path: tuple[str, ...]
    relation: str
    bound: float


def parse(
    text: str,
    suites: Sequence[str],
    *,
    label: str = "",
    examples: str = "'kl.mean<0.1'",
    not_run: str = "add it to --suite",
) -> Assertion:
    """Parse an assertion such as `kl.mean<0.1`.

    Args:
        text: an alias or a dotted path of eval.json, with or without `suites.`; an operator; a number.
        suites: the suites that are run.
        label: the option and what the user wrote there, for errors; by default `--assert` and the text.
        examples: what may be written, for errors.
        not_run: what to do where the text names a suite that is not run, for errors.

    Raises:
        InvalidInput: the text has another form, names a suite that is not run or no number of the report, or
            can never hold.
    """
    match = _FORM.fullmatch(text)
    try:
        bound = float(match[3]) if match else float("nan")
    except ValueError:
        bound = float("nan")
    label = label or f"--assert {text!r}"
    if match is None or not math.isfinite(bound):
        raise InvalidInput(f"{label} is not a comparison with a number; write for example {examples}")
    names = _whole_path(match[1])
    if names[0] == "suites" and names[1:2] and names[1] in SUITES and names[1] not in suites:
        raise InvalidInput(f"{label} names the suite {names[1]}, which is not run; {not_run}")
    _check_path(names, suites, label)
    _check_range(names, match[2], bound, label)
    return Assertion(text, names, match[2], bound)


def _check_range(names: tuple[str, ...], relation: str, bound: float, label: str) -> None:
    """Refuse a comparison that no value of a number meets; its interval may reach beyond its range."""
    *above, own = names[:-1] if names[-1] == "mean" else names
    known = "kl_percentiles" if above[-1:] == ["kl_percentiles"] else own
    low, high = _RANGES.get(known, (-math.inf, math.inf))
    can_hold = {
        "<": low < bound,
        "<=": low <= bound,
        "==": low <= bound <= high,
        ">=": high >= bound,
        ">": high > bound,
    }
    if not can_hold[relation]:
        most = "" if math.isinf(high) else f" and at most {high}"
        number = ".".join(names).removeprefix("suites.")
        raise InvalidInput(f"{label} can never hold: {number} is at least {low}{most}; give another bound")


def check_models(assertions: Sequence[Assertion], missing: Mapping[str, str]) -> None:
    """Refuse assertions that no measurement can meet, before anything is measured.

    Raises:
        InvalidInput: a number would be undefined without one of them.
    """
    for assertion in assertions:
        path = ".".join((*assertion.path[1:], ""))
        for role, reason in missing.items():
            if path.startswith(tuple(f"{start}." for start in _READ_FROM[role])):
                raise InvalidInput(f"--assert {assertion.text!r} can never hold: {reason}")


def short_names(suites: Sequence[str]) -> list[str]:
    """Return the short names of the numbers that some suites measure.

    Example:
        >>> short_names(["cache"])
        ['cache.ratio', 'cache.elements']
    """
    return [name for name, path in ALIASES.items() if path.partition(".")[0] in suites]


def look_up(path: str, report: dict[str, Any]) -> float | None:
    """Return a number of a report by its path, such as `kl.mean`; None where it is undefined.

    Raises:
        InvalidInput: the path leads nowhere, or not to a number.
    """
    names = _whole_path(path)
    _check_path(names, tuple(report["suites"]), repr(path))
    return _value(names, report, repr(path))


def _whole_path(text: str) -> tuple[str, ...]:
    """Return a path from the report's root, of an alias or of a path with or without `suites.`."""
    names = tuple(ALIASES.get(text, text).removeprefix("suites.").split("."))
    return ("suites", *names) if names[0] in SUITES else names


def _check_path(names: tuple[str, ...], suites: Sequence[str], label: str) -> None:
    """Refuse a path that no report has, before anything is measured.

    Below keys that depend on the run, such as the names of tasks, a path is checked in the report itself.
    """
    if names[0] not in HEAD:
        short = short_names(suites)
        paths = {ALIASES[name]: name for name in short}
        hint = suggest(".".join(names), [*suites, *short], paths)
        raise InvalidInput(f"{label}: the report has no {names[0]}; {hint}")
    kind: Any = EvalReport
    for depth, name in enumerate(names):
        place = ".".join(names[:depth]) or "the report"
        if names[:depth] == ("suites",):
            known: Mapping[str, Any] = BLOCKS
        elif is_dataclass(kind):
            known = {each.name: get_type_hints(kind)[each.name] for each in fields(kind)}
        elif kind in (int, float, str, bool):
            raise InvalidInput(f"{label}: {place} is a single value and has no {name}")
        else:
            return
        if name not in known:
            raise InvalidInput(f"{label}: {place} has no {name}; it has {', '.join(known)}")
        kinds = [each for each in get_args(known[name]) if each is not type(None)]
        kind = kinds[0] if isinstance(known[name], UnionType) and len(kinds) == 1 else known[name]
    there = [each.name for each in fields(kind)] if is_dataclass(kind) else []
    if there or kind in (str, bool):
        has = f"; it has {', '.join(there)}" if there else ""
        raise InvalidInput(f"{label}: {'.'.join(names)} is not a number{has}")


def check(assertions: Sequence[Assertion], report: dict[str, Any]) -> None:
    """Check that a report meets all assertions.

    Raises:
        InvalidInput: the report has no such path, or its value is not a number.
        Unmet: at least one assertion does not hold; an undefined value never meets one.
    """
    values = [
        (assertion, _value(assertion.path, report, f"--assert {assertion.text!r}"))
        for assertion in assertions
    ]
    unmet = [
        f"{assertion.text} (it is {'undefined' if value is None else f'{value:.6g}'})"
        for assertion, value in values
        if value is None or not _OPERATORS[assertion.relation](value, assertion.bound)
    ]
    if unmet:
        raise Unmet(f"does not hold: {'; '.join(unmet)}")


def _value(path: tuple[str, ...], report: dict[str, Any], label: str) -> float | None:
    value: Any = report
    for depth, name in enumerate(path):
        if value is None:  # undefined in this report, and so are its parts
            return None
        if isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
            continue
        if not isinstance(value, dict) or name not in value:
            there = ", ".join(value) if isinstance(value, dict) else "nothing"
            place = ".".join(path[:depth]) or "the report"
            raise InvalidInput(f"{label}: {place} has no {name}; it has {there}")
        value = value[name]
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    has = f"; it has {', '.join(value)}" if isinstance(value, dict) else ""
    raise InvalidInput(f"{label}: {'.'.join(path)} is not a number{has}")
