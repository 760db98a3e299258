"""An interrupted evaluation resumes, gives the same report, and mixes with no other."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvfold.core.errors import InvalidInput
from kvfold.eval.cli import main
from kvfold.eval.evaluation_journal import EvaluationJournal, reserved
from kvfold.texts.corpus import Text


@pytest.fixture
def file(tmp_path: Path, text: Text) -> Path:
    path = tmp_path / "letters.txt"
    path.write_text(text.joined, encoding="utf-8")
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


class Killed(BaseException):
    """As SIGKILL ends a process: nothing is caught."""


def test_a_killed_run_resumes_and_gives_the_same_report(
    mha: Path, other: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvfold.eval import scores

    common = (
        mha,
        "--teacher",
        other,
        "--text",
        file,
        "--window",
        "32",
        "--batch-size",
        "4",
        "--device",
        "cpu",
    )
    assert run(*common, "--out", tmp_path / "whole.json").exit_code == 0
    real, scored = scores._score_batch, []

    def stop_after(batches: int) -> None:
        def score(sources: Any, ids: Any, mask: Any, chunk: Any, first: int) -> Any:
            if len(scored) == batches:
                raise Killed
            scored.append(first)
            return real(sources, ids, mask, chunk, first)

        monkeypatch.setattr(scores, "_score_batch", score)

    out = tmp_path / "eval.json"
    partial = tmp_path / "eval.json.partial"
    stop_after(2)
    with pytest.raises(Killed):
        run(*common, "--out", out)
    assert partial.is_file()
    assert not out.exists()
    with partial.open("ab") as journal:
        journal.write(b'{"part": "scores/student+te')  # a line that was being written
    stop_after(3)
    with pytest.raises(Killed):
        run(*common, "--out", out)
    stop_after(99)
    assert run(*common, "--out", out).exit_code == 0
    assert scored == [0, 4, 8, 12, 16]  # each batch once
    assert json.loads(out.read_text()) == json.loads((tmp_path / "whole.json").read_text())
    assert not partial.exists()


def test_another_evaluation_does_not_take_up_the_parts(
    mha: Path, other: Path, file: Path, tmp_path: Path
) -> None:
    out, partial = tmp_path / "eval.json", tmp_path / "eval.json.partial"
    arguments = (mha, "--teacher", other, "--text", file, "--device", "cpu", "--out", out)
    with reserved(out) as (journal, _):
        journal.begin({"student": "another checkpoint"})
        journal.keep("cache/student", 1)
    begun = partial.read_text()
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"{partial} is of an interrupted evaluation with another --batch-size, " in result.stderr
    assert (
        "student, teacher, text, versions; repeat its command to resume it, or move it away" in result.stderr
    )
    assert partial.read_text() == begun


def test_parts_are_measured_once_and_come_back_as_json(tmp_path: Path) -> None:
    file = tmp_path / "x.partial"
    first = EvaluationJournal(file)
    first.begin({"asked": (1, Path("a"))})
    assert first.part("speed/student", lambda: {"times": (1, 2)}) == {"times": [1, 2]}
    again = EvaluationJournal(file)
    again.begin({"asked": (1, Path("a"))})
    assert again.part("speed/student", lambda: pytest.fail("measured twice")) == {"times": [1, 2]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        again.keep("speed/teacher", float("nan"))


def test_a_journal_may_have_any_size(tmp_path: Path) -> None:
    """A long text has many windows; what was measured of them is not measured again."""
    file = tmp_path / "eval.json.partial"
    long = EvaluationJournal(file)
    long.begin({"student": "one"})
    for number in range(9):
        long.keep(f"ppl/{number}", "x" * 2**25)
    assert file.stat().st_size > 2**28
    again = EvaluationJournal(file)
    again.begin({"student": "one"})
    assert again.parts == long.parts


@pytest.mark.parametrize(
    "content",
    [
        "mine",
        "[1]\n",
        '{"schema": 2}\n',
        "{",
        '{"part": 1, "value": 2}\n',
        "{\n",
        '{"mine": 1}',
        '{"kvfold_eval": 1',
    ],
)
def test_somebody_elses_file_is_left_alone(tmp_path: Path, content: str) -> None:
    partial = tmp_path / "eval.json.partial"
    partial.write_text(content)
    if content.startswith('{"kvfold'):  # what a kill may leave of the first line
        with reserved(tmp_path / "eval.json") as (journal, write):
            journal.begin({})
            write("{}")
        assert (tmp_path / "eval.json").read_text() == "{}"
        return
    with (
        pytest.raises(InvalidInput, match=r"partial exists; move it, or name another file"),
        reserved(tmp_path / "eval.json"),
    ):
        pytest.fail("went on")
    assert partial.read_text() == content
