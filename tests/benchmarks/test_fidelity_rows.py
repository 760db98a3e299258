"""Rows of benchmarks.fidelity: which are measured, with text or statistics that some methods ignore."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import fidelity
from benchmarks.fidelity import FOLDS, RULES, Trial, chosen, main, updated
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.core.errors import InvalidInput

from ..support.tiny import make
from ..support.tokenizers import save_tokenizer


def test_rows_are_chosen_by_label_and_method() -> None:
    assert chosen((), ()) == chosen((), ("all",)) == [*FOLDS, *RULES]
    assert chosen((), ("care", "mean")) == ["gqa mean", "mla care"]
    assert chosen(("gqa", "mla care"), ("subspace",)) == ["gqa"]


@pytest.mark.parametrize(
    ("only", "methods", "sentence"),
    [((), ("palu",), "--method palu names no row"), (("mlo",), (), "--only mlo names no row")],
)
def test_a_row_that_does_not_exist(only: tuple[str, ...], methods: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        chosen(only, methods)


def test_settings_in_the_place_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only these are tried, each by its rule's row, and the best of them is the cell."""
    lost = {"care:balance2": 0.2, "care": 0.3, "svd": 0.1}
    monkeypatch.setattr(
        Trial,
        "measure",
        lambda self, label, to, method, options, steps: {"lost": lost[method], "standard_error": 0},
    )
    only = ("care@8", "svd@4", "care:balance2@8")
    none: Any = SimpleNamespace(geometry=None)
    trial = Trial(directory=none, source=none, statistics=none, text=none, options=none, work=none, only=only)
    cell = fidelity.sweep(trial, "care", "50%")
    assert cell is not None
    assert cell["setting"] == "--method care:balance2 --rope-dim 8"
    assert [cell["lost"] for cell in cell["settings"].values()] == [0.3, 0.2]
    done = CliRunner().invoke(main, ["demo", "--text", "stdlib", "--name", "tiny", "--setting", "care"])
    assert "--setting care is no rule and width" in str(done.exception)


def test_every_method_takes_saved_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source", num_key_value_heads=4, vocab_size=258)
    save_tokenizer(source)
    saved, text = tmp_path / "saved.safetensors", tmp_path / "text.txt"
    study(open_source(source), "self", sequences=8, length=32, seed=0, save=saved)
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    monkeypatch.setattr("benchmarks.machine.RESULTS", tmp_path)
    monkeypatch.setattr(fidelity, "SHARES", (0.5,))
    rows = ["gqa mean", "gqa, closed form", "mla xecomla", "mla care"]
    words = [
        str(source),
        "--text",
        str(text),
        "--calibration",
        str(saved),
        "--window",
        "16",
        "--name",
        "tiny",
    ]
    words += ["--max-windows", "4", "--budget", "50%", "--method", "all"]
    words += [part for row in rows for part in ("--only", row)]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0
    for row in rows:
        ignored = f"{row}: --calibration {saved} is ignored: --method" in done.stderr
        assert ignored == (row in {"gqa mean", "mla xecomla"})
    found = json.loads((tmp_path / "fidelity-tiny.json").read_text())
    assert set(found["rows"]) == set(rows)
    tried = found["rows"]["mla care"]["50%"]["settings"]
    assert any(":fold" in setting for setting in tried)
    assert sum(":balance" in setting for setting in tried) >= 2


def test_rows_of_an_earlier_run_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.fidelity.RESULTS", tmp_path)
    about = {"protocol": "text", "text_sha256": "0", "calibration": ["self", 8, 32], "source_perplexity": 2.0}
    noted = {"gqa, by hand": {"50%": {"lost": 0.4}}}  # of another run, under a name of its own
    first = {**about, "rows": {**noted, "gqa": {"50%": {"lost": 0.2}}}}
    assert updated("tiny", first) == first
    (tmp_path / "fidelity-tiny.json").write_text(json.dumps(first))
    second = {**about, "rows": {"gqa": {"25%": {"lost": 0.3}}, "mla": {"50%": {"lost": 0.1}}}}
    rows = {"gqa": {"50%": {"lost": 0.2}, "25%": {"lost": 0.3}}, "mla": {"50%": {"lost": 0.1}}}
    assert updated("tiny", second)["rows"] == {**rows, **noted}
    with pytest.raises(InvalidInput, match=r"fidelity-tiny.json has a source of perplexity 2.0"):
        updated("tiny", {**second, "source_perplexity": 2.1})
