"""The notebook of the Quickstart runs from its first cell to its last, on less text."""

import json
from pathlib import Path
from typing import Any

import pytest

import kvfold

from ..support.shown_code import ROOT


def cells(kind: str) -> list[str]:
    notebook = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fold, train, evaluate = kvfold.fold, kvfold.train, kvfold.evaluate

    def fold_less(*arguments: Any, **options: Any) -> Any:
        return fold(*arguments, **{**options, "sequences": 2, "length": 32, "refine": 0})

    def train_less(recipe: dict[str, Any]) -> Any:
        return train({**recipe, "stages": [{**stage, "tokens": 4096} for stage in recipe["stages"]]})

    monkeypatch.setattr(kvfold, "fold", fold_less, raising=False)
    monkeypatch.setattr(kvfold, "train", train_less, raising=False)
    monkeypatch.setattr(
        kvfold,
        "evaluate",
        lambda *given, **options: evaluate(*given, **{**options, "max_windows": 2}),
        raising=False,
    )
    names: dict[str, Any] = {}
    for number, source in enumerate(cells("code")):
        exec(compile(source, f"quickstart.ipynb, code cell {number}", "exec"), names)
    assert names["folded"].cache["ratio"] <= 0.25
    assert names["run"].steps == 1
    assert names["report"]["kl.mean"] > 0


def test_no_output_is_stored() -> None:
    """Outputs would go stale; the reader makes them."""
    notebook = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert len(cells("markdown")) >= 5
