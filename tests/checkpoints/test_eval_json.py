"""eval.json: reports of kvfold 0.1.0 are read, damaged ones are refused in one sentence."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvfold.checkpoints.eval_json import BLOCKS, HEAD, measured_by, read_report
from kvfold.core.errors import InvalidInput
from kvfold.eval.result import Result

REPORTS = Path(__file__).parent / "reports"
CURRENT = REPORTS / "schema-2.json"
NEWEST = REPORTS / "schema-2-storage.json"


def stored() -> Any:
    return json.loads(CURRENT.read_text())


def without_none(content: Any) -> Any:
    """Return plain values without the keys of mappings that have none."""
    if isinstance(content, dict):
        return {key: without_none(value) for key, value in content.items() if value is not None}
    return [without_none(value) for value in content] if isinstance(content, list) else content


def written(directory: Path, content: Any) -> Path:
    path = directory / "eval.json"
    path.write_text(json.dumps(content))
    return path


def test_a_stored_report_is_read_and_written_with_the_same_content() -> None:
    report = read_report(NEWEST, REPORTS)
    assert json.loads(report.to_text()) == json.loads(NEWEST.read_text())
    assert tuple(json.loads(NEWEST.read_text())) == HEAD
    older = read_report(CURRENT, REPORTS)
    blocks = {**older.suites, **report.suites}
    assert {name: type(block) for name, block in blocks.items()} == BLOCKS


def test_a_report_of_before_a_field_was_added_lacks_it_alone() -> None:
    assert without_none(json.loads(read_report(CURRENT, REPORTS).to_text())) == without_none(stored())


def test_a_stored_report_shows_itself_as_a_table() -> None:
    result = Result(**vars(read_report(CURRENT, REPORTS)))
    assert result.columns == ["", "student", "teacher", "parent"]
    assert {len(row) for row in result.rows} == {4}
    rows = {row[0]: row[1:] for row in result.rows}
    models = [stored()["suites"]["ppl"][role]["perplexity"] for role in result.columns[1:]]
    assert rows["perplexity"] == [f"{perplexity:.4g}" for perplexity in models]


def test_suites_may_be_missing_empty_or_unknown(tmp_path: Path) -> None:
    unknown = {"count": {"student": 3}}
    suites = {"cache": stored()["suites"]["cache"], "fidelity": None, "weights": unknown}
    path = written(tmp_path, stored() | {"suites": suites, "teacher": None, "later": [1]})
    report = read_report(path, tmp_path)
    assert report.suites["weights"] == unknown
    assert report.fidelity is None
    assert report.cache.student.elements_per_token == suites["cache"]["student"]["elements_per_token"]
    assert measured_by(tmp_path) is None, "there is no perplexity"


@pytest.mark.parametrize(("place", "value", "words"), [
    ("suites.ppl.student.perplexity", float("nan"), "suites.ppl.student.perplexity: .*finite"),
    ("suites.ppl.student.perplexity", -1.0, "suites.ppl.student: .*perplexity must be greater than 0"),
    ("suites.ppl.teacher.nll.mean", "good", "suites.ppl.teacher.nll.mean: "),
    ("suites.cache.ratio", 0, "suites.cache: .*ratio must be greater than 0"),
    ("suites.retrieval.student.passkey.accuracy", [[1.0]], "passkey: .*one column per depth"),
    ("suites.retrieval.student.multikey.choice", [[2.0, 0.0]], "multikey: .*between 0 and 1"),
    ("suites.tasks.tasks.arc_easy.primary", "f1", "arc_easy: .*there is no metric f1"),
    ("suites.speed.cells", {}, "suites.speed.cells: "),
    ("checkpoint", 3, r"\(checkpoint: "),
    ("protocol.windows", "many", r"\(protocol.windows: "),
    ("schema", 1, "not a report of schema 2 .its schema is 1.; move it away and measure again: kvfold eval"),
    ("checkpoint.path", str(REPORTS), "was measured on"),
])  # fmt: skip
def test_damaged_reports_are_one_sentence(tmp_path: Path, place: str, value: Any, words: str) -> None:
    content = stored()
    *above, last = place.split(".")
    inner = content
    for key in above:
        inner = inner[key]
    assert last in inner
    inner[last] = value
    path = written(tmp_path, content)
    with pytest.raises(InvalidInput, match=words) as raised:
        read_report(path, tmp_path)
    assert "\n" not in str(raised.value)


def test_the_description_is_light_to_import() -> None:
    code = (
        "import sys, kvfold.checkpoints.eval_json\n"
        "print(sorted({'torch', 'pydantic', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
