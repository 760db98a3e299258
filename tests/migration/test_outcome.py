"""The end of `kvfold migrate`.

With the better of fold and distilled, and with what another bound can go on from.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold.core.work import WorkDir
from kvfold.migration import cli, request_reader, steps
from kvfold.migration.request import begun_request, replace_json, working_directory

from ..support.migrations import arguments, interrupt, invoke, unproven


def test_another_bound_goes_on_from_what_met_none(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unproven(monkeypatch)
    out, unmet = tmp_path / "out", tmp_path / "out.unmet"
    first = invoke(arguments(texts, out, "ppl<0.5x", steps="50%"))
    assert first.exit_code == 3
    assert (
        f"use another bound or begin --steps with a larger cache, and the same command resumes from "
        f"{out}.partial" in first.stderr
    )
    weights = (unmet / "model.safetensors").read_bytes()
    (unmet / "mine").touch()
    # A bound on the KL may ask for the fold's own evaluation; nothing else is made again.
    for name in ("study", "rewrite", "distill"):
        monkeypatch.setattr(steps, name, None)
    second = invoke([*arguments(texts, out, "kl<1e-9", steps="50%"), "--json"])
    assert second.exit_code == 3, second.output
    assert json.loads((unmet / "report.json").read_text()) == json.loads(second.stdout)
    assert json.loads(second.stdout)["until"] == "kl<1e-9"
    assert (unmet / "mine").exists()
    third = invoke([*arguments(texts, out, "ppl<9x", steps="50%"), "--json"])
    assert third.exit_code == 0, third.output
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
    done = invoke([*words, "--set", "evaluate=null", "--json", "--keep-steps"])
    assert done.exit_code == 0, done.output
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


def test_a_run_that_was_killed_while_it_tidied_up_has_ended(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_calibration_is_as_long_as_that_of_convert(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that is shorter counts, and so does what a run of an earlier version began with."""
    seen: list[Any] = []
    monkeypatch.setattr(cli, "_run", lambda asked: seen.append(asked) or {"met": True})
    for window, begun in (("256", None), ("32", None), ("256", 128)):
        out = tmp_path / f"{window}-{begun}"
        if begun is not None:
            working_directory(out).mkdir()
            record = {"kvfold_migrate": 1, "calibration": {"length": begun}}
            replace_json(working_directory(out) / "asked.json", record)
        done = invoke([*arguments(texts, out, window=window), "--json"])
        assert done.exit_code == 0, done.output
    assert [asked.calibration["length"] for asked in seen] == [None, 32, 128]


@pytest.mark.parametrize("length", [None, 128])
def test_a_begun_run_keeps_the_length_of_its_calibration(
    length: int | None, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of an earlier version, which wrote a number where this one leaves the length open."""
    unproven(monkeypatch)
    lengths: list[int | None] = []
    study = steps.study

    def seen(*given: Any, **options: Any) -> Any:
        lengths.append(options["length"])
        return study(*given, **options)

    monkeypatch.setattr(steps, "study", seen)
    results = []
    for name, stop in (("whole", ""), ("begun", "study")):
        out = tmp_path / name
        words = [*arguments(texts, out, window="256", steps="50%"), "--json"]
        with monkeypatch.context() as patch:
            if length is not None:
                patch.setattr(request_reader, "_length", lambda *_: length)
            if stop:
                patch.setattr(steps, stop, interrupt)
            assert invoke(words).exit_code == (130 if stop else 0)
        if stop:
            record = begun_request(working_directory(out))
            assert record is not None
            assert record["calibration"]["length"] == length
            again = invoke(words)
            assert again.exit_code == 0, again.output
        results.append((out / "model.safetensors").read_bytes())
    assert lengths == [length] * 2
    assert results[0] == results[1]


def test_a_migration_of_an_earlier_version_is_resumed(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had a record of its request in place of a journal."""
    unproven(monkeypatch)
    out = tmp_path / "out"
    words = arguments(texts, out, steps="50%")
    with monkeypatch.context() as patch:
        patch.setattr(steps, "distill", interrupt)
        assert invoke(words).exit_code == 130
    partial = working_directory(out)
    replace_json(partial / "asked.json", begun_request(partial))
    (partial / "journal.jsonl").unlink()
    partial.chmod(0o755)
    other = invoke([*words, "--seed", "1"])
    assert (other.exit_code, "differs in calibration.seed (was 0)" in other.stderr) == (2, True)
    monkeypatch.setattr(steps, "rewrite", None)
    assert invoke(words).exit_code == 0
    assert not partial.exists()
