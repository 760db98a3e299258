"""The tables of nats lost in README and docs/results.md say what the result files say."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("story-1m-gqa", "prose-6m-mha")
BUDGETS = ("50%", "25%", "12.5%")
ROWS = {  # rows of a table, with their names in fidelity-*.json
    "GQA `mean` (the usual way)": "gqa mean",
    "GQA `aligned`": "gqa aligned",
    "GQA `aligned:grouped`": "gqa aligned:grouped",
    "GQA, `--calibration none`": "gqa, weights only",
    "GQA, `--refine 0`": "gqa, closed form",
    "GQA, default effort": "gqa, default effort",
    "**GQA** `--effort best`": "gqa",
    "MLA, `--calibration none`": "mla, weights only",
    "MLA, `--slots uniform --refine 0`": "mla uniform, closed form",
    "MLA, `--refine 0`": "mla, closed form",
    "MLA, `--latent-norm linear`": "mla, linear norm",
    "MLA, default effort": "mla, default effort",
    "**MLA** `--effort best`": "mla",
    "MLA, `--rope intact --refine 0`": "mla --rope intact, closed form",
    "MLA, `--rope intact`": "mla --rope intact",
}
NO_NUMBER = {"-", "not measured", "not run"}


def _measured() -> dict[str, list[str]]:
    """Return the six cells of each row as a table prints them; "-" where a cell was not measured."""
    files = [ROOT / f"benchmarks/results/fidelity-{source}.json" for source in SOURCES]
    results: list[dict[str, Any]] = [json.loads(file.read_text())["rows"] for file in files]
    names = dict.fromkeys(name for rows in results for name in rows)
    cells = {}
    for name in names:
        found = [rows.get(name, {}).get(budget) for rows in results for budget in BUDGETS]
        cells[name] = ["-" if cell is None else f"{cell['lost']:.4f}" for cell in found]
    return cells


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_nats_lost_are_those_of_the_result_files(page: str) -> None:
    measured, wrong, seen = _measured(), [], 0
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        label, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rule = label.removeprefix("MLA `").removesuffix("`")
        name = ROWS.get(label) or f"mla {rule}"
        if len(cells) != 6 or name not in measured or not (label in ROWS or label == f"MLA `{rule}`"):
            continue
        seen += 1
        printed = ["-" if cell in NO_NUMBER else cell for cell in cells]
        if printed != measured[name]:
            wrong.append(f"{label}: {printed}, measured {measured[name]}")
    assert not wrong, "\n".join(wrong)
    assert seen >= 7, "the table was not found"
