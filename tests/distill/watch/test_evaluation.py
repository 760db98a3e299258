"""Evaluation while training changes nothing, resumes, and never reads what is trained on."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from kvfold.checkpoints.record import read_record
from kvfold.core.errors import InvalidInput
from kvfold.distill.data.batch import Batch
from kvfold.distill.recipe.recipe import Evaluate
from kvfold.distill.run.job import distill
from kvfold.distill.stages import state
from kvfold.distill.stages.state import Progress
from kvfold.distill.watch.evaluation import TrainingEvaluation, best_of, summary
from kvfold.distill.watch.held_out import HeldOut
from kvfold.eval import stored_teacher
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.windows import TextWindows
from kvfold.texts.corpus import Text, read_text

from ...support.distillation import command, curve, interrupt, launch, metrics, weights, write_recipe
from ..conftest import MakeRecipe


def history(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "evaluations.jsonl").read_text().splitlines()]


def test_it_finds_what_eval_finds_and_changes_nothing(
    make_recipe: MakeRecipe, held: Path, student: Path, teacher: Path, tmp_path: Path
) -> None:
    section = {"source": str(held), "every": 4, "windows": 6}
    out = distill(make_recipe(evaluate=section)).output
    plain = distill(make_recipe(output=str(tmp_path / "plain"))).output
    assert all(torch.equal(tensor, weights(plain)[name]) for name, tensor in weights(out).items())

    found = curve(out)
    assert [point["step"] for point in found["points"]] == [0, 4, 8, 10]
    assert [point["tokens"] for point in found["points"]] == [0, 768, 1536, 1920]
    result = evaluate(out, teacher, read_text(str(held)), Options(window=32, max_windows=6), student)
    assert found["teacher_perplexity"] == pytest.approx(result.ppl.teacher.perplexity, rel=1e-5)
    assert found["points"][0]["perplexity"] == pytest.approx(result.ppl.parent.perplexity, rel=1e-5)
    last = found["points"][-1]
    assert last["perplexity"] == pytest.approx(result.ppl.student.perplexity, rel=1e-2)  # stored in bfloat16
    assert last["kl"] == pytest.approx(result.fidelity.kl.mean, rel=3e-2)
    assert last["recovered_share"] == pytest.approx(result.ppl.recovered_share.value, abs=0.03)
    assert found["text_sha256"] == read_text(str(held)).sha256

    lines = {line["step"]: line for line in metrics(out)}
    assert [step for step, line in lines.items() if "eval_perplexity" in line] == [4, 8, 10]
    assert lines[10]["eval_perplexity"] == last["perplexity"]
    assert lines[10].get("recovered_share") == last["recovered_share"]


def test_a_student_that_diverged_is_named_whatever_shows_it(
    make_recipe: MakeRecipe, held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the file of evaluations, in which such a line would be damage."""
    found = TrainingEvaluation._found

    def diverged(self: Any, sum_NK: Any, past: Any) -> dict[str, Any]:
        return found(self, sum_NK, past) | ({"kl": math.nan} if past else {})

    monkeypatch.setattr(TrainingEvaluation, "_found", diverged)
    with pytest.raises(InvalidInput, match=r"after step 4 the divergence from the teacher on .* is nan"):
        distill(make_recipe(evaluate={"source": str(held), "every": 4, "windows": 6}))


def test_the_curve_is_drawn(make_recipe: MakeRecipe, held: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    stages = [
        {"name": "align", "tokens": 384, "lr": 1e-3, "batch_tokens": 192, "train": "attention",
         "losses": {"attention_output": 1}},
        {"name": "kl", "tokens": 384, "lr": 1e-2, "batch_tokens": 192},
    ]  # fmt: skip
    out = distill(make_recipe(stages=stages, evaluate={"source": str(held), "windows": 4})).output
    assert (out / "curve.png").read_bytes()[:4] == b"\x89PNG"
    points = curve(out)["points"]
    assert [(point["stage"], point["step"]) for point in points] == [("align", 0), ("align", 2), ("kl", 4)]
    assert all(math.isfinite(point["perplexity"]) for point in points)


def test_without_matplotlib_there_are_the_numbers(
    make_recipe: MakeRecipe, held: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvfold.distill.watch.evaluation.find_spec", lambda name: None)
    out = distill(make_recipe(tokens=192, evaluate={"source": str(held), "windows": 4})).output
    assert not (out / "curve.png").exists()
    assert len(curve(out)["points"]) == 2
    assert "pip install 'kvfold[report]'" in caplog.text


def test_the_best_weights_can_be_the_output(make_recipe: MakeRecipe, held: Path) -> None:
    """A stage that learns before one whose rate destroys everything: what is best is not what is last."""
    section = {"source": str(held), "every": 1, "windows": 4, "keep": "best"}
    common = {"batch_tokens": 192, "micro_batch": 4, "warmup": 0, "schedule": "constant"}
    learns = {**common, "name": "learns", "tokens": 576, "lr": 1e-3}
    destroys = {**common, "name": "destroys", "tokens": 192, "lr": 5.0, "grad_clip": None}
    out = distill(make_recipe(evaluate=section, stages=[learns, destroys])).output
    points = curve(out)["points"]
    best, last = min(points, key=lambda point: point["perplexity"]), points[-1]
    assert points[0]["perplexity"] > best["perplexity"]
    assert best["perplexity"] < 0.5 * last["perplexity"]
    found = evaluate(out, None, read_text(str(held)), Options(window=32, max_windows=4))
    assert found.ppl.student.perplexity == pytest.approx(best["perplexity"], rel=5e-3)  # stored in bfloat16
    assert not out.with_name("out.partial").exists()
    told = read_record(out)
    assert told["distill"]["evaluation"]["step"] == best["step"]
    assert told["distill"]["evaluation"]["perplexity"] == best["perplexity"]


def test_weights_of_a_stage_before_the_first_evaluation_are_not_those_of_the_start() -> None:
    line = {"step": 79, "perplexity": 2.6, "kl": 0.2, "same_top1": 0.8, "recovered_share": None}
    first = {**line, "text": "held", "text_sha256": "0", "teacher": {"perplexity": 2.3}}
    assert summary([first], (first, None))["kept"] == "best"
    untrained = {**first, "step": 0}
    assert summary([untrained], (untrained, None))["kept"] == "start"


def test_the_start_stays_where_nothing_beats_it(
    make_recipe: MakeRecipe, held: Path, student: Path, tmp_path: Path
) -> None:
    """A rate that makes every step worse: the output is the student, bit for bit, and says so."""
    section = {"source": str(held), "every": 1, "windows": 4, "keep": "best"}
    recipe = make_recipe(evaluate=section, tokens=576, lr=5.0, losses={"ce": 1.0}, warmup=0, grad_clip=None)
    file = write_recipe(recipe, tmp_path / "recipe.yaml")
    done = command(file, code=0)
    assert "no trained weights are better than the start on held-out text" in done.stderr
    assert done.stderr.count("if it stays above, the lr of stage kl is too high") == 1
    assert "after step 1 the perplexity of the held-out text is " in done.stderr
    assert "(after step 0)" in done.stdout
    out = tmp_path / "out"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (student / name).read_bytes()
    told = read_record(out)
    assert told["stage"] == "distill"
    found, points = told["distill"]["evaluation"], curve(out)["points"]
    assert (found["kept"], found["step"], found["perplexity"]) == ("start", 0, points[0]["perplexity"])
    assert all(point["perplexity"] > points[0]["perplexity"] for point in points[1:])
    last = command(file, "--set", "evaluate.keep=last", "--set", f"output={tmp_path / 'last'}", code=0)
    assert "training made the student worse on held-out text; use a lower lr" in last.stderr


def test_another_held_out_text_is_refused_later(make_recipe: MakeRecipe, held: Path, tmp_path: Path) -> None:
    text = tmp_path / "held.txt"
    text.write_bytes(held.read_bytes())
    recipe = make_recipe(evaluate={"source": str(text), "every": 2, "windows": 4})
    interrupt(recipe, 3)
    text.write_text("another " + held.read_text(), encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"evaluate\.source .* is .* that .*out\.partial was started with"):
        distill(recipe)


def test_a_killed_run_keeps_its_history_and_its_best(
    make_recipe: MakeRecipe, held: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after evaluations that no state was saved for: a resumed run ends with the same files."""
    section = {"source": str(held), "every": 2, "windows": 4, "keep": "best"}
    made = {"evaluate": section, "tokens": 192 * 22, "save": {"every": 7}}
    whole = distill(make_recipe(output=str(tmp_path / "whole"), **made)).output
    save = state.save

    def die(
        directory: Path, progress: state.Progress, gathered: state.Gathered, keep: int, **more: Any
    ) -> None:
        if directory.name == "state" and progress.total_steps == 21:
            raise SystemExit("killed")
        save(directory, progress, gathered, keep, **more)

    with monkeypatch.context() as patch:
        patch.setattr(state, "save", die)
        with pytest.raises(SystemExit, match="killed"):
            distill(make_recipe(**made))
    partial = tmp_path / "out.partial"
    assert [line["step"] for line in history(partial)] == list(range(0, 21, 2))
    kept = {int(path.name.removeprefix("step-")) for path in (partial / "best").iterdir()}
    for until in (14, 20):  # the best up to the last saved state, and the best of all
        best = best_of([line for line in history(partial) if line["step"] <= until])
        assert best["step"] in kept
    assert len(kept) <= 2
    out = distill(make_recipe(**made)).output
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(out).items())
    assert (out / "curve.json").read_bytes() == (whole / "curve.json").read_bytes()


def test_the_share_that_was_recovered(tmp_path: Path) -> None:
    """A fold that lost 1 nat on each window, of which 3/4 come back."""
    ids_NW = torch.arange(24).view(4, 6)
    text = Text("four", ("any",))
    windows = TextWindows("four", "none", 6, ids_NW, torch.ones(4, 5, dtype=torch.bool), torch.full((4,), 5))
    run: Any = SimpleNamespace(accelerator=Accelerator(cpu=True), partial=tmp_path)
    evaluation = TrainingEvaluation(run, Evaluate(source="four"), HeldOut(windows, text), None)  # type: ignore[arg-type]
    losses = iter([3.0] * 4 + [2.25] * 4)

    def measure(batch: Batch, teacher: Any) -> dict[str, Any]:
        noise = 0.01 * int(batch.input_ids_BS[0, 0])
        values = {"ce": next(losses) + noise, "teacher_ce": 2.0 + noise, "forward_kl": 0.5, "same_top1": 0.25}
        return {name: torch.tensor(5 * value) for name, value in values.items()}

    evaluation.start(measure, "kl", Progress())
    evaluation.start(measure, "kl", Progress())  # once only
    found = evaluation.evaluate(measure, "kl", Progress(total_steps=3, tokens=99))
    assert found["recovered_share"] == pytest.approx(0.75)
    assert found["eval_perplexity"] == pytest.approx(math.exp(2.25 + 0.01 * 9))
    assert (found["eval_kl"], found["eval_same_top1"]) == (0.5, 0.25)
    assert [line["recovered_share"] for line in history(tmp_path)] == [None, pytest.approx(0.75)]


@pytest.mark.parametrize(
    "settings",
    [{"train": "lora"}, {"gradient_checkpointing": True}, {"teacher": "shared", "train": "attention"}],
)
def test_it_goes_with_every_way_of_training(
    make_recipe: MakeRecipe, held: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    if settings.get("train") == "lora":
        pytest.importorskip("peft", reason="pip install peft")
    section = {"source": str(held), "every": 1, "windows": 4, "keep": "best"}
    out = distill(make_recipe(tokens=576, evaluate=section, **settings)).output
    plain = distill(make_recipe(tokens=576, output=str(tmp_path / "plain"), **settings)).output
    points = curve(out)["points"]
    assert [point["step"] for point in points] == [0, 1, 2, 3]
    best = min(points, key=lambda point: point["perplexity"])
    found = evaluate(out, None, read_text(str(held)), Options(window=32, max_windows=4))
    assert found.ppl.student.perplexity == pytest.approx(best["perplexity"], rel=1e-2)
    for mine, theirs in zip(metrics(out), metrics(plain), strict=True):
        assert mine["kl"] == theirs["kl"]


def test_after_a_streamed_stage_there_is_no_fold_to_compare_with(make_recipe: MakeRecipe, held: Path) -> None:
    common = {"tokens": 192, "lr": 1e-3, "batch_tokens": 192}
    stream = {
        **common, "name": "stream", "mode": "stream", "train": "attention",
        "losses": {"attention_output": 1.0},
    }  # fmt: skip
    section = {"source": str(held), "windows": 4, "keep": "best"}
    out = distill(make_recipe(stages=[stream, {**common, "name": "kl"}], evaluate=section)).output
    points = curve(out)["points"]
    assert [(point["step"], point["recovered_share"]) for point in points] == [(1, None), (2, None)]


def test_a_cached_teacher_is_compared_with_too(make_recipe: MakeRecipe, held: Path, tmp_path: Path) -> None:
    section = {"source": str(held), "windows": 4}
    online = distill(make_recipe(tokens=384, evaluate=section)).output
    for name in ("first", "second"):
        cached = {"teacher_cache": str(tmp_path / "cache"), "output": str(tmp_path / name)}
        distill(make_recipe(tokens=384, evaluate=section, **cached))
        assert (tmp_path / name / "curve.json").read_bytes() == (online / "curve.json").read_bytes()
    files = (tmp_path / "cache").glob("hidden-*")
    lengths = {load_file(file)["hidden"].shape[:2] for file in files}
    assert (4, 31) in lengths  # the held-out windows are in it, next to those of the run


def test_eval_finds_the_states_that_a_run_has_kept(
    make_recipe: MakeRecipe, held: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run finds those of an evaluation: one directory serves both."""
    section = {"source": str(held), "windows": 4}
    cache = tmp_path / "cache"
    out = distill(make_recipe(tokens=384, evaluate=section, teacher_cache=str(cache))).output
    text, options = read_text(str(held)), {"window": 32, "max_windows": 4, "device": "cpu"}
    monkeypatch.setattr(stored_teacher, "last_hidden", None)  # the teacher must not run
    found = evaluate(out, teacher, text, Options(**options, teacher_cache=cache)).fidelity
    monkeypatch.undo()
    plain = evaluate(out, teacher, text, Options(**options)).fidelity
    assert found.kl.mean == pytest.approx(plain.kl.mean, rel=1e-4)

    evaluate(out, teacher, text, Options(**options, teacher_cache=tmp_path / "other"))
    files = set((tmp_path / "other").iterdir())
    again = {"teacher_cache": str(tmp_path / "other"), "output": str(tmp_path / "again")}
    distill(make_recipe(tokens=384, evaluate=section, **again))
    shapes = [load_file(file)["hidden"].shape[1] for file in set((tmp_path / "other").iterdir()) - files]
    assert shapes == [32]  # windows of the run; those of the held-out text, of 31 tokens, were there
    with pytest.raises(InvalidInput, match=r"was made with another dtype \('float32', not 'bfloat16'\)"):
        evaluate(out, teacher, text, Options(**options, dtype="bfloat16", teacher_cache=cache))


def test_the_best_is_the_first_of_equals_the_start_among_them() -> None:
    lines = [{"step": step, "perplexity": value} for step, value in ((0, 3.0), (2, 3.0), (4, 2.0), (6, 2.0))]
    assert [best_of(lines[:count]) for count in (0, 1, 2, 3, 4)] == [
        None, lines[0], lines[0], lines[2], lines[2],
    ]  # fmt: skip


@pytest.mark.parametrize("profile", ["ddp", "fsdp2"])
def test_two_processes_find_as_one(make_recipe: MakeRecipe, held: Path, tmp_path: Path, profile: str) -> None:
    """An odd number of windows, between steps, where shards are whole for a moment."""
    section = {"source": str(held), "every": 2, "windows": 5, "keep": "best"}
    stages = [
        {"name": name, "tokens": 576, "lr": 1e-3, "batch_tokens": 192, "micro_batch": 2, "train": train}
        for name, train in (("first", "attention"), ("second", "all"))
    ]
    alone = distill(make_recipe(stages=stages, evaluate=section)).output
    assert (
        launch(make_recipe(stages=stages, evaluate=section, output=str(tmp_path / "together")), profile) == 0
    )
    one, other = (curve(path)["points"] for path in (alone, tmp_path / "together"))
    assert [point["step"] for point in one] == [0, 2, 3, 4, 6]
    for mine, theirs in zip(one, other, strict=True):
        for key in ("step", "tokens", "perplexity", "kl", "same_top1"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4)
    torch.testing.assert_close(weights(alone), weights(tmp_path / "together"), rtol=0, atol=4e-3)  # bfloat16
