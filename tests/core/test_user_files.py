"""Commands leave the user's files alone, whatever their names, and a killed run resumes next to them."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kvfold.convert.calibration import study
from kvfold.convert.calibration.statistics import RUN_DIGITS, Statistics, read_run
from kvfold.convert.write import rewrite
from kvfold.core.errors import InvalidInput
from kvfold.eval.run import reserved

from ..support.commands import run_main
from ..support.tiny import make, same_bytes
from ..support.warm_python import warm_python

MLA = ("--to", "mla", "--rank", "24", "--rope-dim", "4")
SELF = ("--calibration", "self", "--sequences", "2", "--length", "16", "--refine", "0")


def convert(source: Path, *options: str, out: Path, code: int | None = None) -> Result:
    return run_main("convert", source, *MLA, *options, "--out", out, code=code)


def test_an_error_leaves_files_that_came_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source")

    def fail(plan: Any, number: int) -> None:
        (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
        raise InvalidInput("no fold")

    monkeypatch.setattr(rewrite, "fold", fail)
    result = convert(source, "--calibration", "none", out=tmp_path / "out", code=2)
    assert f"no fold; thesis.txt in {tmp_path / 'out.partial'} was left in place" in result.output
    left = {path.name: path.read_bytes() for path in (tmp_path / "out.partial").iterdir()}
    assert left == {"thesis.txt": b"mine"}


def test_a_foreign_file_never_is_part_of_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All work is kept until the file is moved."""
    source = make(tmp_path / "source")
    assert convert(source, "--calibration", "none", out=tmp_path / "whole").exit_code == 0
    foreign, fold, folded = tmp_path / "out.partial" / "model" / "thesis.txt", rewrite.fold, []

    def write(plan: Any, number: int) -> Any:
        foreign.write_text("mine")
        folded.append(number)
        return fold(plan, number)

    monkeypatch.setattr(rewrite, "fold", write)
    for words in ("thesis.txt, which kvfold did not write; move it", "it holds model/thesis.txt; move it"):
        assert words in convert(source, "--calibration", "none", out=tmp_path / "out", code=2).output
        assert foreign.read_text() == "mine"
    layers = list(folded)
    foreign.rename(tmp_path / "thesis.txt")
    assert convert(source, "--calibration", "none", out=tmp_path / "out").exit_code == 0
    assert folded == layers, "finished layers were folded again"
    assert same_bytes(tmp_path / "out", tmp_path / "whole") == []


KILLED = """
import os, signal, sys
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.cli import main
save = Statistics.save
def die(self, file, run=""):
    save(self, file, run)
    os.kill(os.getpid(), signal.SIGKILL)
Statistics.save = die
main(sys.argv[1:])
"""


def test_a_killed_run_resumes_with_its_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, file = make(tmp_path / "source"), tmp_path / "s.safetensors"
    options = (*SELF, "--save-statistics", str(file))
    assert convert(source, *SELF, out=tmp_path / "whole").exit_code == 0
    command = [warm_python(), "-c", KILLED, str(source), *MLA, *options, "--out", str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -9
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out.partial", "s.safetensors", "source", "whole"]
    kept = file.read_bytes()
    # Another run is not this one: other settings, or another source of the same shapes.
    for other, changed in ((source, ("--seed", "1")), (make(tmp_path / "other", seed=7), ())):
        refused = convert(other, *options, *changed, out=tmp_path / "out", code=2)
        assert "s.safetensors exists and nothing is overwritten" in refused.output
    monkeypatch.setattr(study, "_collect", lambda *_, **__: pytest.fail("taken again"))
    assert "is used as it is" in convert(source, *options, out=tmp_path / "out", code=0).stderr
    assert file.read_bytes() == kept
    assert same_bytes(tmp_path / "out", tmp_path / "whole") == []
    assert len(read_run(file)) == RUN_DIGITS
    bare = tmp_path / "bare.safetensors"
    Statistics.load(file).save(bare)  # as earlier versions did: the tensors are aligned as here
    assert (file.stat().st_size - bare.stat().st_size) == 64
    assert len(Statistics.load(file).layers) == 2


def test_two_runs_may_save_the_same_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run starts and ends while the first takes its statistics."""
    source, file = make(tmp_path / "source"), tmp_path / "s.safetensors"
    options, collect = (*SELF, "--save-statistics", str(file)), study._collect
    second: tuple[str, ...] = ()

    def overtaken(*given: Any, **named: Any) -> Statistics:
        monkeypatch.setattr(study, "_collect", collect)
        assert convert(source, *options, *second, out=tmp_path / "second").exit_code == 0
        return collect(*given, **named)

    monkeypatch.setattr(study, "_collect", overtaken)
    first = convert(source, *options, out=tmp_path / "first", code=0)
    assert "another run has saved" in first.stderr
    assert "it holds the same statistics" in first.stderr
    assert same_bytes(tmp_path / "first", tmp_path / "second") == []
    file.unlink()
    (tmp_path / "second").rename(tmp_path / "earlier")
    second = ("--seed", "1")  # another command, whose file is not accepted and not overwritten
    monkeypatch.setattr(study, "_collect", overtaken)
    refused = convert(source, *options, out=tmp_path / "third", code=2)
    assert "s.safetensors exists, and nothing is overwritten" in refused.output
    assert Statistics.load(file).seed == 1
    assert not (tmp_path / "third").exists()


def test_statistics_that_another_run_saved_with_other_numbers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = make(tmp_path / "source"), tmp_path / "s.safetensors"
    options, save = (*SELF, "--save-statistics", str(file)), study._keep

    def late(statistics: Statistics, place: Path, run: str) -> None:
        replace(statistics, seed=statistics.seed + 1).save(place, run)  # as another machine's may differ
        save(statistics, place, run)

    monkeypatch.setattr(study, "_keep", late)
    refused = convert(source, *options, out=tmp_path / "out", code=2)
    assert "s.safetensors with other numbers" in refused.output
    resumed = convert(source, *options, out=tmp_path / "out")
    assert resumed.exit_code == 0, resumed.output  # with these numbers, as the sentence says


def test_statistics_of_another_model_are_refused(tmp_path: Path) -> None:
    """Its shapes are the same; a copy of the source is the source, and earlier files do not say."""
    source, file, earlier = make(tmp_path / "source"), tmp_path / "s.safetensors", tmp_path / "e.safetensors"
    assert convert(source, *SELF, "--save-statistics", str(file), out=tmp_path / "out").exit_code == 0
    replace(Statistics.load(file), source="").save(earlier)
    other, copy = make(tmp_path / "other", seed=7), Path(shutil.copytree(source, tmp_path / "copy"))
    words = ("--refine", "0", "--calibration")
    refused = convert(other, *words, str(file), out=tmp_path / "refused", code=2)
    assert f"holds statistics of another model than {other}, whose weights differ; collect" in refused.stderr
    assert convert(copy, *words, str(file), out=tmp_path / "copied").exit_code == 0
    told = convert(other, *words, str(earlier), out=tmp_path / "taken", code=0)
    assert "does not name the model of its statistics" in told.stderr


def test_an_evaluation_leaves_the_users_names_alone(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "e.json", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (tmp_path / "e.json.new").symlink_to(elsewhere)
    with reserved(out) as (journal, write):
        journal.begin({})
        journal.add({"ppl/student": 1})
        write("{}")
    assert (out.read_text(), elsewhere.read_text()) == ("{}", "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.json", "e.json.new", "elsewhere"]
