"""`kvfold report`: files and places that are refused, in one sentence each."""

import json
from pathlib import Path

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.eval.page.groups import read_groups

from ...support.pages import NEEDS_EXTRA, record, run_report, write_checkpoint

pytestmark = NEEDS_EXTRA


def damage(directory: Path, file: str, content: str) -> Path:
    (directory / file).write_text(content)
    return directory


@pytest.mark.parametrize(("file", "content", "words"), [
    ("eval.json", "{", "not valid JSON"),
    ("eval.json", "[]", "not a report of schema 2"),
    ("eval.json", '{"schema": 1}', "not a report of schema 2 (its schema is 1)"),
    ("eval.json", '{"schema": 2, "checkpoint": 3, "suites": {}}', "not what kvfold writes (checkpoint"),
    ("kvfold.json", "{}", "is damaged"),
    ("kvfold.json", json.dumps(record() | {"layers": [{"planned": "much"}]}),
     "not what kvfold writes (layers.0.planned"),
    ("metrics.jsonl", "{}\nno\n", "is damaged"),
    ("curve.json", '{"text": "a", "teacher_perplexity": 1, "points": []}', "not what kvfold writes (points"),
])  # fmt: skip
def test_damaged_files_are_refused(tmp_path: Path, file: str, content: str, words: str) -> None:
    result = run_report(
        damage(write_checkpoint(tmp_path / "fold"), file, content), "--out", tmp_path / "page"
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.output
    assert not (tmp_path / "page").exists()


def test_places_that_are_taken_or_wrong(tmp_path: Path) -> None:
    fold, taken = write_checkpoint(tmp_path / "fold"), tmp_path / "taken"
    taken.write_text("mine")
    (tmp_path / "empty").mkdir()
    moved = write_checkpoint(tmp_path / "moved")
    (moved / "eval.json").write_text((fold / "eval.json").read_text())
    for arguments, words in (
        ((fold, "--out", taken), "exists; name another"),
        ((fold, "--out", tmp_path / "new", "--png", taken), "exists; name another"),
        ((fold, "--out", tmp_path / "no" / "new"), "there is no directory"),
        ((tmp_path / "nothing", "--out", tmp_path / "new"), "is not a directory"),
        ((tmp_path / "empty", "--out", tmp_path / "new"),
         f"kvfold eval {tmp_path}/empty --text stdlib --out {tmp_path}/empty/eval.json"),
        ((moved, "--out", tmp_path / "new"), "was measured on"),
        ((fold, "--out", "/proc/new"), "/proc/new"),
    ):  # fmt: skip
        result = run_report(*arguments)
        assert result.exit_code == 2, arguments
        assert words in result.output
    assert taken.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"fold", "taken", "empty", "moved"}
    with pytest.raises(InvalidInput, match="at least one"):
        read_groups([])


def test_a_directory_that_is_named_twice_is_told(tmp_path: Path) -> None:
    fold = write_checkpoint(tmp_path / "fold")
    result = run_report(fold, tmp_path / "." / "fold" / ".." / "fold", "--out", tmp_path / "page")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("is named more than once; the page shows it once") == 1
    once = run_report(fold, "--out", tmp_path / "other")
    assert "more than once" not in once.stderr
