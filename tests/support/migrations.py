"""Runs of `kvfold migrate` on the demonstration checkpoint."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kvfold.migration import steps

from .commands import run_main

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
IDENTITY = {"checked": False, "reason": "another test is about it"}


def arguments(texts: Path, out: Path, bound: str = "ppl<9x", **changed: str) -> list[str]:
    """Return a short migration's command line, with options replaced or added."""
    options = {
        "to": "gqa", "steps": "50%,0.125", "text": str(texts / "held.txt"), "train": str(texts / "train.txt"),
        "tokens-per-step": "2k", "window": "32", "max-windows": "4", "sequences": "2", "refine": "1",
        "until": bound,
        "out": str(out), "set": "evaluate=null", **changed,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return ["migrate", str(DEMO), *words, "--set", "stages.0.batch_tokens=512"]


def invoke(words: list[str], code: int | None = None) -> Result:
    """Run `kvfold`, which must end with `code` if that is given."""
    return run_main(*words, code=code)


def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare migrations the proof, which another test is about."""
    monkeypatch.setattr(steps, "_identity", lambda asked: IDENTITY)


def interrupt(*_: Any, **__: Any) -> None:
    """Stand in for a function that the user interrupts."""
    raise KeyboardInterrupt
