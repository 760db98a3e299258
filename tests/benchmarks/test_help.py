"""Every benchmark can be imported, and says what it measures."""

from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(
    ".".join(file.relative_to(FOLDER).with_suffix("").parts)
    for file in FOLDER.rglob("*.py")
    if "@click.command" in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", NAMES)
def test_help(name: str) -> None:
    module = import_module(f"benchmarks.{name}")
    shown = CliRunner().invoke(module.main, ["--help"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert shown.stdout.startswith("Usage: ")
