"""Outputs that break a rule about an engine, and the table of what the engine did with them."""

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch

from kvfold.convert.cli import main as convert
from kvfold.core.console import show_table
from kvfold.core.errors import InvalidInput
from kvfold.engines.rules.engine_rules import RULES, lint
from kvfold.engines.rules.rule_types import open_written
from tests.support.tiny import make

from .folds import DEMO, HEAD, SOURCES, widen
from .machine import save

TOKENS = 48  # of the text; the tiny Gemma 2 has a window of 9
WRONG = 0.1  # nats, mean: more than rounding a fold costs


def fold(root: Path, name: str, source: str, options: str) -> tuple[Path, Path]:
    """Return the directories of a source of folds.SOURCES, or `demo`, and of its fold."""
    place, out = root / source.replace(", ", "-").replace(" ", "-"), root / name.replace(" ", "-")
    if not place.exists():
        widen(DEMO, place, HEAD) if source == "demo" else make(place, **SOURCES[source])
    calibration = [] if "--calibration" in options else ["--calibration", "none"]
    convert.main([str(place), *options.split(), *calibration, "--out", str(out)], standalone_mode=False)
    return place, out


def text(config: dict[str, Any]) -> list[int]:
    """Return random tokens of a checkpoint's vocabulary."""
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(3, config["vocab_size"], (TOKENS,), generator=generator).tolist()
    return tokens


def ruled(out: Path, condition: str, engine: str) -> list[str]:
    """Return what the rules say of an output in an engine.

    Raises:
        InvalidInput: it does not break the rule of that condition.
    """
    written = open_written(out)
    named = "" if condition == "always" else condition
    if not any(
        rule.found(written)
        for rule in RULES
        if engine in rule.engines and written.layout in rule.layouts and rule.condition == named
    ):
        raise InvalidInput(f"{out} does not break the rule that it was made to break: {condition}")
    return [str(finding) for finding in lint(out, [engine])]


def finish(rows: list[dict[str, Any]], engine: str, name: str, packages: Iterable[str]) -> None:
    """Print the table of some outputs, and save it; exit with 1 where a rule is not true.

    Args:
        rows: of the outputs, with `output`, `condition`, `found` and `true`.
        engine: as the title has it.
        name: of the file in benchmarks/results; empty saves nothing.
        packages: whose versions are saved with it.
    """
    cells = [
        (row["output"], row["condition"], row["found"], "ok" if row["true"] else "FAILS") for row in rows
    ]
    show_table(f"{engine} and outputs that break a rule", ("output", "rule", "found", ""), cells)
    if not all(row["true"] for row in rows):
        raise SystemExit(1)
    if name:
        versions = {package: version(package) for package in packages}
        click.echo(f"saved in {save(name, {'versions': versions, 'rows': rows})}")
