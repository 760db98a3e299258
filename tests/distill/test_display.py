"""The display of a stage: a table on a terminal, lines elsewhere, the numbers of metrics.jsonl."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvfold.core.console import listening, showing
from kvfold.distill import display
from kvfold.distill.display import SHOWN, duration, progress_table, shown
from kvfold.distill.run.job import distill
from kvfold.distill.stages.state import Progress
from kvfold.distill.watch.report import StageReport

from ..support.distillation import metrics
from .conftest import MakeRecipe

VALUES = {
    "loss": 0.25, "forward_kl": 0.125, "same_top1": 0.5, "eval_perplexity": 12.3456, "recovered_share": 0.417,
    "tokens_per_second": 12345.6, "memory_gib": 1.5, "seconds_left": 125,
}  # fmt: skip


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (125, "2 min"), (5400, "1 h 30 min"), (200_000, "2 d 7 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_is_not_known_is_left_out() -> None:
    assert [heading for heading, _ in shown(VALUES)] == [heading for _, heading, _ in SHOWN]
    assert shown({"loss": 1.0, "lr": 3.0}) == [("loss", "1.0000")]


def test_a_terminal_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with showing(), progress_table("kl", 86) as show:
        show(12, VALUES)
    for text in [
        "done",
        "12/86",
        "KL",
        "0.1250",
        "recovered",
        "41.7%",
        "12,346",
        "1.50 GiB",
        "left",
        "2 min",
    ]:
        assert text in terminal.getvalue()


def test_elsewhere_are_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(display, "PLAIN_INTERVAL", 0.0)
    with showing(), progress_table("kl", 86) as show:
        show(12, VALUES)
    line = capsys.readouterr().err
    assert line.startswith(
        "kl: 12/86 loss 0.2500  KL 0.1250  same top-1 0.500  perplexity 12.35  recovered 41.7%"
    )
    assert line.count("\n") == 1


def test_others_say_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(display, "PLAIN_INTERVAL", 0.0)
    monkeypatch.setenv("RANK", "1")
    with showing(), progress_table("kl", 86) as show:
        show(12, VALUES)
    assert capsys.readouterr().err == ""


def test_a_run_shows_what_it_logs(
    make_recipe: MakeRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(display, "PLAIN_INTERVAL", 0.0)
    held = tmp_path / "held.txt"
    held.write_text(" ".join(map(str, range(300))), encoding="utf-8")
    section = {"source": str(held), "every": 2, "windows": 4}
    with showing():
        distill(make_recipe(losses={"kl": 0.5, "ce": 0.1}, tokens=576, evaluate=section))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kl: ")]
    assert len(lines) == 3
    for line, logged in zip(lines, metrics(tmp_path / "out"), strict=True):
        assert f"loss {0.5 * logged['kl'] + 0.1 * logged['ce']:.4f}  KL {logged['forward_kl']:.4f}" in line
        assert f"same top-1 {logged['same_top1']:.3f}" in line
        assert "perplexity" in line  # from the first step on: that of the fold
    assert f"perplexity {metrics(tmp_path / 'out')[1]['eval_perplexity']:.4g}" in lines[1]


def test_the_time_of_evaluations_is_not_the_trainings(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 tokens in 2 s, and 98 s in which nothing was trained."""
    now, recipe = [0.0], make_recipe()

    class Evaluation:
        settings = SimpleNamespace(every=1)
        history = staticmethod(lambda: [{"perplexity": 1.0, "recovered_share": None}])
        start = keep_best = staticmethod(lambda *_: None)

        @staticmethod
        def evaluate(*_: Any) -> dict[str, float]:
            now[0] += 98
            return {}

    monkeypatch.setattr("kvfold.distill.watch.report.time.monotonic", lambda: now[0])
    accelerator = SimpleNamespace(is_main_process=True, log=lambda *_, **__: None)
    run = SimpleNamespace(recipe=recipe, accelerator=accelerator, partial=tmp_path)
    context: Any = SimpleNamespace(run=run, stage=recipe.stages[0], student=None)
    evaluation: Any = Evaluation()
    work: Any = SimpleNamespace(measure=None)
    report = StageReport(context, work, Progress(tokens=50), lambda *_: None, evaluation)
    now[0] = 2
    report.record(Progress(step=1, total_steps=1, tokens=150), {"kl": 1.0})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["tokens_per_second"] == 50


def test_a_library_shows_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Outside a command the steps go to whoever listens, and to no terminal."""
    monkeypatch.setattr(display, "PLAIN_INTERVAL", 0.0)
    heard: list[tuple[str, int, int]] = []

    def listen(description: str, done: int, total: int) -> None:
        heard.append((description, done, total))

    with listening(listen), progress_table("kl", 86) as show:
        show(12, VALUES)
    with progress_table("kl", 86) as show:
        show(13, VALUES)
    assert heard == [("kl", 12, 86)]
    assert capsys.readouterr().err == ""
