"""Result files with rows of several runs: which are kept, which replaced, and what is said of their runs."""

import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import saved_rows
from benchmarks.saved_rows import SavedRows


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(saved_rows, "RESULTS", tmp_path)
    return tmp_path / "engine.json"


def _run(version: str, *rows: dict[str, Any], update: bool = True) -> None:
    saved = SavedRows("engine", {"version": version}, update=update)
    for row in rows:
        saved.put("rows", row, "fold")
    saved.write()


def _versions(file: Path) -> dict[str, str]:
    """Return the version that measured each fold."""
    result = json.loads(file.read_text())
    return {row["fold"]: result["runs"][row["run"]]["version"] for row in result["rows"]}


def test_every_row_names_its_own_run(results: Path) -> None:
    _run("1", {"fold": "a", "kl": 1.0}, {"fold": "b", "kl": 2.0})
    _run("2", {"fold": "b", "kl": 3.0}, {"fold": "c", "kl": 4.0})
    assert _versions(results) == {"a": "1", "b": "2", "c": "2"}
    rows = json.loads(results.read_text())["rows"]
    assert [row["kl"] for row in rows] == [1.0, 3.0, 4.0]
    assert SavedRows("engine", {}, update=True).find("rows", fold="b", kl=3.0) is not None
    assert SavedRows("engine", {}, update=True).find("rows", fold="d") is None


def test_a_run_that_no_row_names_is_left_out(results: Path) -> None:
    _run("1", {"fold": "a"})
    _run("2", {"fold": "a"})
    assert [run["version"] for run in json.loads(results.read_text())["runs"]] == ["2"]
    assert _versions(results) == {"a": "2"}


def test_the_same_run_again_is_one_run(results: Path) -> None:
    _run("1", {"fold": "a"})
    _run("1", {"fold": "b"})
    assert len(json.loads(results.read_text())["runs"]) == 1


def test_without_update_earlier_rows_are_gone(results: Path) -> None:
    _run("1", {"fold": "a"})
    _run("2", {"fold": "b"}, update=False)
    assert _versions(results) == {"b": "2"}


def test_two_runs_at_a_time_keep_the_rows_of_both(results: Path) -> None:
    one, other = (SavedRows("engine", {"version": version}, update=True) for version in "12")
    for saved, fold in ((one, "a"), (other, "b"), (one, "c")):
        saved.put("rows", {"fold": fold}, "fold")
        saved.write()
    assert _versions(results) == {"a": "1", "b": "2", "c": "1"}


def test_a_run_that_begins_anew_keeps_what_is_written_after_it_began(results: Path) -> None:
    _run("1", {"fold": "a"})
    anew = SavedRows("engine", {"version": "2"}, update=False)
    anew.put("rows", {"fold": "b"}, "fold")
    anew.write()
    other = SavedRows("engine", {"version": "3"}, update=True)
    other.put("rows", {"fold": "c"}, "fold")
    other.write()
    anew.put("rows", {"fold": "d"}, "fold")
    anew.write()
    assert _versions(results) == {"b": "2", "c": "3", "d": "2"}


def _put(directory: Path, fold: str) -> None:
    """Save ten rows, one at a time, in a process of its own."""
    saved_rows.RESULTS = directory
    for number in range(10):
        _run("1", {"fold": f"{fold}{number}"})


def test_processes_keep_the_rows_of_each_other_and_leave_no_lock(
    results: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = tmp_path_factory.mktemp("spare")
    monkeypatch.setenv("TMPDIR", str(spare))
    monkeypatch.setattr(tempfile, "tempdir", None)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_put, args=(results.parent, fold)) for fold in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert _versions(results).keys() == {f"{fold}{number}" for fold in "abc" for number in range(10)}
    assert list(results.parent.iterdir()) == [results]
    assert list(spare.iterdir()) == []
