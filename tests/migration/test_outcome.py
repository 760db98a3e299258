"""The end of `kvfold migrate`: the better of fold and distilled, and what another bound resumes from."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold.core.work import WorkDir, working_directory
from kvfold.migration import steps

from ..support.migrations import arguments, interrupt, invoke, unproven


def test_another_bound_goes_on(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unproven(monkeypatch)
    out, unmet = tmp_path / "out", tmp_path / "out.unmet"
    first = invoke(arguments(texts, out, "ppl<0.5x", steps="50%"), code=3)
    assert (
        f"use another bound or begin --steps with a larger cache, and the same command resumes from "
        f"{out}.partial" in first.stderr
    )
    weights = (unmet / "model.safetensors").read_bytes()
    (unmet / "mine").touch()
    # A bound on the KL may ask for the fold's own evaluation; nothing else is made again.
    for name in ("study", "rewrite", "distill"):
        monkeypatch.setattr(steps, name, None)
    second = invoke([*arguments(texts, out, "kl<1e-9", steps="50%"), "--json"], code=3)
    assert json.loads((unmet / "report.json").read_text()) == json.loads(second.stdout)
    assert json.loads(second.stdout)["until"] == "kl<1e-9"
    assert (unmet / "mine").exists()
    third = invoke([*arguments(texts, out, "ppl<9x", steps="50%"), "--json"], code=0)
    assert f"{unmet} is of an earlier bound" in third.stderr
    assert (out / "model.safetensors").read_bytes() == weights
    assert json.loads(third.stdout)["met"]
    assert not out.with_name("out.partial").exists()


def test_a_fold_that_its_distillation_made_worse_stands_for_itself(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unproven(monkeypatch)
    out = tmp_path / "out"
    words = arguments(texts, out, steps="50%", set="stages.0.lr=0.5")
    done = invoke([*words, "--set", "evaluate=null", "--json", "--keep-steps"], code=0)
    assert "distillation made 50% worse, so its fold is used" in done.stderr
    report = json.loads(done.stdout)
    (step,) = report["steps"]
    assert (report["kept"], step["kept"], step["met"]) == ("folded", "folded", True)
    assert step["perplexity"]["distilled"] > step["perplexity"]["folded"]
    assert step["perplexity_ratio"]["mean"] == pytest.approx(
        step["perplexity"]["folded"] / step["perplexity"]["source"]
    )
    assert json.loads((out / "kvfold.json").read_text())["stage"] == "convert"
    assert {str(path.relative_to(out)) for path in out.glob("steps/*/*")} == {"steps/distilled/50%"}
    told = json.loads((out / "steps" / "distilled" / "50%" / "kvfold.json").read_text())
    assert told["parents"][-1]["path"] == str(out.resolve())
    for name in ("kvfold.json", "eval.json", "report.json"):
        assert ".partial" not in (out / name).read_text(), name


def test_a_run_killed_at_its_end(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    words = [*arguments(texts, out, steps="50%"), "--json"]
    unproven(monkeypatch)
    discard = WorkDir.discard
    with monkeypatch.context() as patch:
        ends = {working_directory(out): interrupt}
        patch.setattr(WorkDir, "discard", lambda work: ends.get(work.path, discard)(work))
        assert invoke(words).exit_code == 130
    assert out.exists()
    again = invoke(words)
    assert (again.exit_code, "out is already complete" in again.stderr) == (0, True)
    assert json.loads(again.stdout) == json.loads((out / "report.json").read_text())
    assert not out.with_name("out.partial").exists()
    assert (invoke(words).exit_code, "out exists" in invoke(words).stderr) == (2, True)


def test_calibration_is_as_long(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a window is shorter, it is as long as that."""
    seen: list[Any] = []
    monkeypatch.setattr(steps, "migrate", lambda asked: seen.append(asked) or {"met": True})
    for window in ("256", "32"):
        invoke([*arguments(texts, tmp_path / window, window=window), "--json"], code=0)
    assert [asked.calibration["length"] for asked in seen] == [None, 32]
