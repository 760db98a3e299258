"""Paths of one machine in what is published."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvfold.checkpoints.record import hub_id, source_directory
from kvfold.core.errors import InvalidInput
from kvfold.publishing.publish import prepare

from ..support.commands import run_main
from ..support.tiny import make


def metadata(card: str) -> dict[str, Any]:
    fields: dict[str, Any] = yaml.safe_load(card.split("---")[1])
    return fields


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("folded")
    words = ["convert", str(make(place / "source")), "--to", "mla", "--kv-budget", "50%"]
    run_main(*words, "--calibration", "none", "--out", place / "out")
    return place / "out"


def test_places_of_this_machine_are_published_by_their_names(
    folded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    record = json.loads((folded / "kvfold.json").read_text())
    source = "/home/me/.cache/models--org--tiny/snapshots/0123"
    record["source"] |= {"name": "0123", "path": source, "revision": "0123"}
    record["notices"] = [f"{source}/config.json differs", "see /home/me/x/y", "/home/meow/x"]
    record["command"] = f"kvfold convert {source} --calibration 'self+/home/me/my texts/a.jsonl'"
    copied = Path(shutil.copytree(folded, tmp_path / "copied"))
    (copied / "kvfold.json").write_text(json.dumps(record))
    (copied / "eval-1.json").write_text('{"checkpoint": {"path": "/home/me/out/copied"}, "text": "1/2"}')
    (copied / "eval-2.json").write_text('{"a":1}')
    (copied / "report.html").write_bytes(
        b"<b>/home/me/out/copied</b>\r\n\xff kvfold eval /data/me/b --out /data/me/b/c"
    )
    publication = prepare(copied, "org/x")
    assert publication.sizes["eval-1.json"] == len(publication.contents["eval-1.json"])
    assert publication.contents["report.html"] == b"<b>copied</b>\r\n\xff kvfold eval b --out b/c"
    assert "eval-2.json" not in publication.contents  # it keeps its bytes
    told = json.loads(publication.contents["eval-1.json"])
    assert told == {"checkpoint": {"path": "copied"}, "text": "1/2"}
    sent = json.loads(publication.contents["kvfold.json"])
    assert sent["source"] == {**record["source"], "name": "org/tiny", "path": "org/tiny"}
    assert hub_id(sent["source"]) == "org/tiny"
    assert sent["command"] == "kvfold convert org/tiny --calibration 'self+a.jsonl'"
    assert sent["notices"] == ["org/tiny/config.json differs", "see ~/x/y", "/home/meow/x"]
    assert json.loads((copied / "kvfold.json").read_text()) == record
    # Published again from a download, it stays as it is.
    (copied / "kvfold.json").write_bytes(publication.contents["kvfold.json"])
    assert "kvfold.json" not in prepare(copied, "org/x").contents


def test_published_names_are_no_places(folded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Path(shutil.copytree(folded, tmp_path / "copied"))
    (copied / "kvfold.json").write_bytes(prepare(folded, "org/x").contents["kvfold.json"])
    monkeypatch.chdir(folded.parent)  # where a directory has the name of the source
    assert Path("source").is_dir()
    with pytest.raises(InvalidInput, match="source, does not exist any more; name it with --teacher"):
        source_directory(copied)
    (folded.parent / "source" / "README.md").write_text("---\nlicense: mit\n---\n")
    assert "license" not in metadata(prepare(copied, "org/x").card)
    assert metadata(prepare(folded, "org/x").card)["license"] == "mit"
