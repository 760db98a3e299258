"""An interrupted evaluation resumes, gives the same report, and mixes with no other."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold.eval.run import reserved

from .conftest import run


class Killed(BaseException):
    """As SIGKILL ends a process: nothing is caught."""


def test_a_killed_run_resumes_and_gives_the_same_report(
    mha: Path, other: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvfold.eval import scores

    common = f"{mha} --teacher {other} --text {file} --window 32 --batch-size 4 --device cpu".split()
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
    assert not out.exists()
    with (partial / "journal.jsonl").open("ab") as journal:
        journal.write(b'["scores/student+te')  # a line that was being written
    stop_after(3)
    with pytest.raises(Killed):
        run(*common, "--out", out)
    stop_after(99)
    assert run(*common, "--out", out).exit_code == 0
    assert scored == [0, 4, 8, 12, 16]  # each batch once
    assert json.loads(out.read_text()) == json.loads((tmp_path / "whole.json").read_text())
    assert not partial.exists()


def test_another_evaluation_leaves_the_parts(mha: Path, other: Path, file: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "eval.json", tmp_path / "eval.json.partial"
    arguments = (mha, "--teacher", other, "--text", file, "--device", "cpu", "--out", out)
    with reserved(out) as (journal, _):
        journal.begin({"student": "another checkpoint"})
        journal.add({"cache/student": 1})
    begun = (partial / "journal.jsonl").read_text()
    result = run(*arguments, code=2)
    assert (
        f"{partial} holds 1 finished parts of another command, which differs in student (was "
        in result.stderr
    )
    assert (partial / "journal.jsonl").read_text() == begun
