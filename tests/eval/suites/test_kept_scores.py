"""Files of --task-cache, which other people may have made."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.eval.suites.tasks import read_kept

ASKED = {"task": "kv_one", "limit": None}
METRIC: dict[str, Any] = {"value": 0.5, "values": [0.0, 1.0], "documents": ["kv_one/0/a", "kv_one/1/b"]}


def kept(file: Path, metric: Any, **changes: Any) -> Path:
    found = {"samples": 2, "shots": 0, "metrics": {"acc": metric}, **changes}
    file.write_text(json.dumps({"asked": ASKED, "found": found}))
    return file


def test_scores_are_read_as_they_were_kept(tmp_path: Path) -> None:
    found = read_kept(kept(tmp_path / "scores.json", METRIC), ASKED)
    assert found == {"samples": 2, "shots": 0, "metrics": {"acc": METRIC}}
    alone = read_kept(kept(tmp_path / "scores.json", {"value": 9.5}), ASKED)
    assert alone["metrics"]["acc"]["value"] == 9.5


@pytest.mark.parametrize("metric", [
    7,
    {},
    {"value": "x"},
    {"value": float("nan")},
    {**METRIC, "values": [0.0]},
    {**METRIC, "values": [None, 1.0]},
    {**METRIC, "documents": None},
    {**METRIC, "values": [], "documents": []},
])  # fmt: skip
def test_other_content_is_refused(tmp_path: Path, metric: Any) -> None:
    file = kept(tmp_path / "scores.json", metric)
    with pytest.raises(InvalidInput, match="was not written by kvfold or is damaged; move it away"):
        read_kept(file, ASKED)


@pytest.mark.parametrize("changes", [{"samples": None}, {"metrics": [METRIC]}, {"shots": [0]}])
def test_other_fields_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = kept(tmp_path / "scores.json", METRIC, **changes)
    with pytest.raises(InvalidInput, match="was not written by kvfold or is damaged; move it away"):
        read_kept(file, ASKED)
