"""`kvfold.migrate`: the command's search as a function, which prints nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.migration import outcome, steps

from ..support.migrations import DEMO, unproven


def test_a_bound_that_no_step_holds_and_then_another_one(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    unproven(monkeypatch)
    monkeypatch.setattr(outcome, "_write_page", lambda *_: None)  # of figures, which take seconds
    train = tmp_path / "\U0001f600.txt"
    train.write_text((texts / "train.txt").read_text())
    short: dict[str, Any] = {
        "steps": [0.5], "text": texts / "held.txt", "train": texts / "train.txt", "tokens_per_step": 1024,
        "window": 32, "max_windows": 4, "sequences": 2, "refine": 1,
        "settings": {"evaluate": None, "stages.0.batch_tokens": 512, "data.source": train},
    }  # fmt: skip
    seen = []
    found = kvfold.migrate(
        DEMO,
        "gqa",
        until="ppl<0.5x",
        out=tmp_path / "out",
        progress=lambda *state: seen.append(state),
        **short,
    )
    assert not found.met
    assert found.directory == tmp_path / "out.unmet"
    assert [step["cache_ratio"] for step in found.steps] == [0.5]
    assert seen
    found = kvfold.migrate(DEMO, "gqa", until="ppl<9x", out=tmp_path / "out", **short)
    assert found.met
    assert found.directory == tmp_path / "out"
    assert json.loads((found.directory / "report.json").read_text()) == found.report
    assert "50.0%" in str(found)
    assert found.report["distillation"]["stages"][0]["batch_tokens"] == 512
    assert str(train) in json.dumps(found.report["distillation"]["data"], ensure_ascii=False)
    with pytest.raises(kvfold.InvalidInput, match="exists"):
        kvfold.migrate(DEMO, "gqa", until="ppl<9x", out=found.directory, **short)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("changed", "sentence"), [
    ({"to": "mha"}, "to is 'mha'; it should be 'gqa', 'mqa' or 'mla'"),
    ({"until": 1.02}, "until is 1.02; it should be text"),
    ({"until": "cache.ratio<0.5"},
     "until 'cache.ratio<0.5' names the suite cache, which is not run; bound what kvfold migrate measures"),
    ({"window": 1}, "window is 1; it should be"),
    ({"window": "x"}, "window is 'x'; it should be a whole number"),
    ({"tokens_per_step": "many"}, "tokens_per_step is 'many'; it should be a number of tokens"),
    ({"seed": 2**63}, f"seed is {2**63}; it should be less than or equal to {2**63 - 1}"),
    ({"seeds": 3}, "unknown name 'seeds'; did you mean 'seed'"),
    ({"settings": {"stages.0.lr": object()}}, r"recipe: stages\[0\].lr is <object"),
    ({"settings": {"stages.0.lr": float("nan")}}, r"recipe: stages\[0\].lr is nan; it should be a finite"),
    ({"settings": {"stages.0.lr=1": 2}}, r"recipe: unknown key 'lr=1' in stages\[0\]"),
    ({"settings": {"stages.4.lr": 1}}, r"^settings\['stages.4.lr'\]: the recipe has no such key"),
    ({"settings": {"output": "x"}}, r"^settings\['output'\]: every step has its own student and output"),
])  # fmt: skip
def test_mistakes_are_named_as_in_python(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"to": "gqa", "until": "kl<1", "out": tmp_path / "out", **changed}
    with pytest.raises(kvfold.InvalidInput, match=sentence):
        kvfold.migrate(DEMO, **given)
    assert not list(tmp_path.iterdir())


def test_advice_names_the_argument_of_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise kvfold.InvalidInput("add --set evaluate.every=1 to resume it")

    monkeypatch.setattr(steps, "migrate", refuse)
    with pytest.raises(kvfold.InvalidInput, match=r"^add settings evaluate\.every=1 to resume it"):
        kvfold.migrate(DEMO, "gqa", until="kl<1", out=tmp_path / "out")
