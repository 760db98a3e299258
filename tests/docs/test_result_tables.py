"""The tables of docs/results say what the result files say."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "results"
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


def _result(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


def _measured() -> dict[str, list[str]]:
    """Return the six cells of each row as a table prints them; "-" where a cell was not measured."""
    results: list[dict[str, Any]] = [_result(f"fidelity-{source}")["rows"] for source in SOURCES]
    names = dict.fromkeys(name for rows in results for name in rows)
    cells = {}
    for name in names:
        found = [rows.get(name, {}).get(budget) for rows in results for budget in BUDGETS]
        cells[name] = ["-" if cell is None else f"{cell['lost']:.4f}" for cell in found]
    return cells


def test_nats_lost_are_those_of_the_result_files() -> None:
    measured, wrong, seen = _measured(), [], 0
    for line in (PAGES / "folds.md").read_text(encoding="utf-8").splitlines():
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


TRAINED = {  # rows of the table of training and rounding: file, and label of the row in it
    f"{source.split('-')[0]}, {shown}": (source, label)
    for source in ("story-1m-gqa", "prose-6m-mha", "demo")
    for shown, label in {
        "source": "source", "50 %": "fitted 50%", "25 %": "fitted 25%", "12.5 %": "fitted 12.5%",
        "25 %, linear norm": "linear 25%", "25 %, own code": "remote 25%",
    }.items()
}  # fmt: skip


def test_training_and_rounding_are_those_of_the_result_files() -> None:
    wrong, seen = [], 0
    for line in (PAGES / "rounding.md").read_text(encoding="utf-8").splitlines():
        label, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if label not in TRAINED or len(cells) != 11:
            continue
        seen += 1
        source, name = TRAINED[label]
        row: dict[str, float] = _result(f"trainable-{source}")["rows"][name]
        measured = [f"{value:.3f}" for column, value in row.items() if column != "predicted"]
        if cells != measured:
            wrong.append(f"{label}: {cells}, measured {measured}")
    assert not wrong, "\n".join(wrong)
    assert seen >= 12, "the table was not found"


def test_what_an_output_keeps_is_that_of_the_result_files() -> None:
    text = (PAGES / "distillation.md").read_text(encoding="utf-8")
    for name in ("smollm2-135m", "demo", "prose-6m"):
        row = _result(f"saved-students-{name}")
        lost = [f"{row['lost'][label]:.4f}" for label in ("fold", "float32", "nearest", "fair")]
        back = [f"{100 * row['taken_back'][label]:.1f} %" for label in ("nearest", "fair")]
        assert f"| {' | '.join([*lost, *back])} |" in text, name


LABELS = {  # of sources in the table of vLLM, where they differ from those of the file
    "llava": "LLaVA", "mixtral, 8 heads": "mixtral", "mistral3": "Mistral 3", "gemma3": "Gemma 3",
    "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL",
}  # fmt: skip


def _runs(engine: str) -> list[list[str]]:
    """Return the cells of a table that has an engine's runs."""
    cells = []
    for row in _result(f"{engine}-cpu")["rows"]:
        tokens, cache = f"{row['same_tokens']} of {row['tokens']}", row["cache"]
        difference, source = f"{row['max_difference']:.1e}", LABELS.get(row["source"], row["source"])
        fold = f"`{row['options'].replace(' --calibration none', '')}`"
        cells.append([source, fold, difference, tokens, f"{cache['before']:g}", f"{cache[engine]:g}"])
    return cells


def _shown(section: str) -> list[list[str]]:
    text = (PAGES / "engines.md").read_text(encoding="utf-8").split(f"\n## {section}\n")[1]
    lines = text.split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] not in {"source", "fold"}]


def test_runs_in_vllm_are_those_of_the_result_files() -> None:
    measured = _runs("vllm")
    for row in _result("vllm-http-cpu")["rows"]:
        again = f"{row['prefix'][0]} and {row['prefix'][1]} of {row['tokens']}"
        measured.append([row["fold"], f"{row['batch']:.1e}", again])
    assert sorted(_shown("Run by engines")) == sorted(measured)


def test_runs_in_sglang_are_those_of_the_result_file() -> None:
    assert _shown("Run by SGLang") == _runs("sglang")


def test_nats_lost_on_wikitext_are_those_of_the_result_file() -> None:
    rows: dict[str, Any] = _result("fidelity-prose-6m-mha-wikitext2")["rows"]
    page = (PAGES / "folds.md").read_text(encoding="utf-8")
    table = page.partition("\n## On text unlike")[2].partition("On text so unlike")[0]
    printed = {}
    for line in table.splitlines():
        label, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and label.startswith(("GQA", "MLA")):
            printed[_plain(label)] = cells
    assert printed == {
        name: [f"{cells[budget]['lost']:.4f}" for budget in BUDGETS] for name, cells in rows.items()
    }


def test_predicted_folds_are_those_of_the_result_file() -> None:
    predicted = _result("fold-cost-sizes")["predicted"]
    page = (ROOT / "docs/convert.md").read_text(encoding="utf-8")
    table = page.partition("| source | `--kv-budget 25%` |")[2].partition("\n\n")[0]
    found, size = {}, ""
    for line in table.splitlines()[2:]:
        name, options, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        size = name or size
        found[size, options.strip("`")] = cells
    assert found == {
        (size, options.replace(" --kv-budget 25%", "")): [_cost(cost) for cost in costs.values()]
        for options, sizes in predicted.items()
        for size, costs in sizes.items()
    }


def _cost(cost: dict[str, Any]) -> str:
    """Return seconds and bytes as the table prints them: hours with two digits or more."""
    seconds, hours = cost["seconds"], cost["seconds"] / 3600
    time = f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h"
    if hours < 2:
        time = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{time}, {cost['peak_bytes'] / 1e9:.0f} GB"


def _plain(label: str) -> str:
    """Return the name of a row in a result file."""
    known = {key.replace("*", "").partition(" (")[0]: name for key, name in ROWS.items()}
    return known.get(label) or f"mla {label.removeprefix('MLA `').removesuffix('`')}"


def test_nats_lost_by_the_model_of_135_m_parameters_are_those_of_the_result_file() -> None:
    measured = []
    for cells in _result("fidelity-smollm2-135m")["rows"].values():
        for budget, cell in cells.items():
            predicted = "" if cell["predicted"] is None else f"{cell['predicted']:.3f}"
            share = "33 %" if budget == "34%" else budget.replace("%", " %")
            measured.append([share, f"{cell['lost']:.4f}", f"{cell['standard_error']:.3f}", predicted])
    page = (PAGES / "pretrained.md").read_text(encoding="utf-8")
    table = page.partition("\n## Folds for texts of 256 tokens")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    printed = [row[1:] for row in rows if len(row) == 5 and row[0].startswith(("GQA", "MLA"))]
    assert sorted(printed) == sorted(measured)
