"""Outputs on several texts."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvfold
from benchmarks import saved_rows
from benchmarks.outputs import main

DEMO = Path(__file__).parents[2] / "recipes" / "demo"


def test_outputs_are_scored_on_texts_at_several_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_rows, "RESULTS", tmp_path)
    half, quarter = tmp_path / "half", tmp_path / "quarter"
    for out, share in ((half, "50%"), (quarter, "25%")):
        kvfold.fold(DEMO, kvfold.MLA(kv_budget=share), out=out, length=32, sequences=4, refine=0)
    text = tmp_path / "text.txt"
    text.write_text("def add(first, second):\n    return first + second\n" * 40)
    options = ["--window", "32", "--window", "64", "--tokens", "128", "--name", "test"]
    texts = ["--text", str(text), "--text", "stdlib"]
    result = CliRunner().invoke(main, [str(half), str(quarter), *texts, *options])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "outputs-test.json").read_text())["rows"]
    assert [(row["output"], row["text"], row["window"], row["windows"]) for row in rows] == [
        (out, name, window, 128 // window)
        for name in ("text.txt", "stdlib")
        for window in (32, 64)
        for out in ("half", "quarter")
    ]
    for row in rows:
        assert row["stage"] == "convert"
        assert row["command"] == json.loads((tmp_path / row["output"] / "kvfold.json").read_text())["command"]
        assert row["cache"] == pytest.approx({"half": 0.5, "quarter": 0.25}[row["output"]], abs=0.01)
    measured = kvfold.evaluate(quarter, text=text, window=64, max_windows=2)
    (row,) = [
        row for row in rows if (row["output"], row["text"], row["window"]) == ("quarter", "text.txt", 64)
    ]
    assert row["lost"] == pytest.approx(measured["ppl.difference.mean"], rel=1e-4)
    assert row["kl"] == pytest.approx(measured["kl.mean"], rel=1e-4)


def test_other_directories_and_too_few_tokens_are_refused() -> None:
    for options, reason in ((["--tokens", "100"], "less than a window"), ([], "has no kvfold.json")):
        result = CliRunner().invoke(main, [str(DEMO), "--text", "stdlib", "--name", "none", *options])
        assert result.exit_code == 2, result.output
        assert reason in result.output
