"""Commands leave the user's files alone, whatever their names, and a killed run resumes next to them."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvfold.convert.calibration import study
from kvfold.convert.calibration.statistics import RUN_DIGITS, Statistics, read_run
from kvfold.convert.cli import main as convert_main
from kvfold.convert.write import rewrite
from kvfold.core.errors import InvalidInput
from kvfold.core.files import write_whole
from kvfold.eval.evaluation_journal import EvaluationJournal, reserved

from ..support.tiny import make, same_bytes
from ..support.warm_python import warm_python

MLA = ("--to", "mla", "--rank", "24", "--rope-dim", "4")
SELF = ("--calibration", "self", "--sequences", "2", "--length", "16", "--refine", "0")


def convert(source: Path, *options: str, out: Path) -> Result:
    return CliRunner().invoke(convert_main, [str(source), *MLA, *options, "--out", str(out)])


def content(directory: Path) -> dict[str, bytes | str | None]:
    """Return every entry of a directory with its bytes, or its target where it is a link."""
    return {
        str(path.relative_to(directory)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(directory.rglob("*"))
    }


FINGERPRINT = json.dumps("0" * 64) + "\n"


@pytest.mark.parametrize(
    "files",
    [
        {"journal.jsonl": "mine\n"},
        {"journal.jsonl": '["my diary", {}]\n'},
        {"journal.jsonl": FINGERPRINT, "thesis.txt": "mine"},
        {"journal.jsonl": FINGERPRINT, "folder/thesis.txt": "mine"},
        {"lock": "mine"},
        {"model.safetensors": "mine"},
        {"journal.jsonl.partial": "mine"},
    ],
)
def test_a_working_directory_of_somebody_else_is_refused_untouched(
    tmp_path: Path, files: dict[str, str]
) -> None:
    source, partial = make(tmp_path / "source"), tmp_path / "out.partial"
    for name, text in files.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_text(text)
    before = content(partial)
    result = convert(source, "--calibration", "none", out=tmp_path / "out")
    assert result.exit_code == 2
    assert (
        "is not a half-written output of kvfold" in result.output
        or "which kvfold did not write" in result.output
    )
    assert content(partial) == before
    assert not (tmp_path / "out").exists()


def test_a_working_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    (tmp_path / "mine").mkdir()
    for target in ("mine", "nowhere"):
        (tmp_path / "out.partial").symlink_to(target)
        result = convert(source, "--calibration", "none", out=tmp_path / "out")
        assert result.exit_code == 2
        assert "out.partial exists and is not a half-written output" in result.output
        (tmp_path / "out.partial").unlink()
    assert not any((tmp_path / "mine").iterdir())


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"lock": ""},
        {"lock": "", "journal.jsonl.partial": ""},
        {"journal.jsonl": ""},
        {
            "journal.jsonl": FINGERPRINT + '["layer 0", {"mea',
            "model.safetensors": "cut off",
        },  # earlier versions
        {"lock": "", "lock-1": "", "journal.jsonl": FINGERPRINT, "journal-1.jsonl": FINGERPRINT},
    ],
)
def test_what_a_killed_run_leaves_is_taken_over(tmp_path: Path, files: dict[str, str]) -> None:
    source = make(tmp_path / "source")
    assert convert(source, "--calibration", "none", out=tmp_path / "whole").exit_code == 0
    (tmp_path / "out.partial").mkdir()
    for name, text in files.items():
        (tmp_path / "out.partial" / name).write_text(text)
    result = convert(source, "--calibration", "none", out=tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert same_bytes(tmp_path / "out", tmp_path / "whole") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "whole"]


def test_an_error_leaves_files_that_came_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source")

    def fail(plan: Any, number: int) -> None:
        (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
        raise InvalidInput("no fold")

    monkeypatch.setattr(rewrite, "fold", fail)
    result = convert(source, "--calibration", "none", out=tmp_path / "out")
    assert result.exit_code == 2
    assert f"no fold; thesis.txt in {tmp_path / 'out.partial'} was left in place" in result.output
    assert content(tmp_path / "out.partial") == {"thesis.txt": b"mine"}


def test_a_foreign_file_never_becomes_part_of_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All work is kept until the file is moved."""
    source = make(tmp_path / "source")
    assert convert(source, "--calibration", "none", out=tmp_path / "whole").exit_code == 0
    foreign, fold, folded = tmp_path / "out.partial" / "thesis.txt", rewrite.fold, []

    def write(plan: Any, number: int) -> Any:
        foreign.write_text("mine")
        folded.append(number)
        return fold(plan, number)

    monkeypatch.setattr(rewrite, "fold", write)
    for _ in range(2):
        result = convert(source, "--calibration", "none", out=tmp_path / "out")
        assert result.exit_code == 2
        assert "thesis.txt, which kvfold did not write; move it" in result.output
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


def test_a_run_killed_after_its_statistics_resumes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = make(tmp_path / "source"), tmp_path / "s.safetensors"
    options = (*SELF, "--save-statistics", str(file))
    assert convert(source, *SELF, out=tmp_path / "whole").exit_code == 0
    command = [warm_python(), "-c", KILLED, str(source), *MLA, *options, "--out", str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.safetensors", "source", "whole"]
    kept = file.read_bytes()
    # Another run is not this one: other settings, or another source of the same shapes.
    for other, changed in ((source, ("--seed", "1")), (make(tmp_path / "other", seed=7), ())):
        refused = convert(other, *options, *changed, out=tmp_path / "out")
        assert refused.exit_code == 2
        assert "s.safetensors exists and nothing is overwritten" in refused.output
    monkeypatch.setattr("kvfold.convert.calibration.study.load_model", lambda *_: pytest.fail("taken again"))
    resumed = convert(source, *options, out=tmp_path / "out")
    assert resumed.exit_code == 0, resumed.output
    assert "is used as it is" in resumed.stderr
    assert file.read_bytes() == kept
    assert same_bytes(tmp_path / "out", tmp_path / "whole") == []
    assert len(read_run(file)) == RUN_DIGITS
    bare = tmp_path / "bare.safetensors"
    Statistics.load(file).save(bare)  # as earlier versions did: the tensors are aligned as here
    assert (file.stat().st_size - bare.stat().st_size) == 64
    assert len(Statistics.load(file).layers) == 2


def test_two_runs_that_save_the_same_statistics_both_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run starts and ends while the first takes its statistics."""
    source, file = make(tmp_path / "source"), tmp_path / "s.safetensors"
    options, collect = (*SELF, "--save-statistics", str(file)), study._collect
    second: tuple[str, ...] = ()

    def overtaken(*given: Any, **named: Any) -> Statistics:
        monkeypatch.setattr(study, "_collect", collect)
        assert convert(source, *options, *second, out=tmp_path / "second").exit_code == 0
        return collect(*given, **named)

    monkeypatch.setattr(study, "_collect", overtaken)
    first = convert(source, *options, out=tmp_path / "first")
    assert first.exit_code == 0, first.output
    assert "another run has saved" in first.stderr
    assert "it holds the same statistics" in first.stderr
    assert same_bytes(tmp_path / "first", tmp_path / "second") == []
    file.unlink()
    (tmp_path / "second").rename(tmp_path / "earlier")
    second = ("--seed", "1")  # another command, whose file is not accepted and not overwritten
    monkeypatch.setattr(study, "_collect", overtaken)
    refused = convert(source, *options, out=tmp_path / "third")
    assert refused.exit_code == 2
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
    refused = convert(source, *options, out=tmp_path / "out")
    assert refused.exit_code == 2
    assert "s.safetensors with other numbers" in refused.output
    resumed = convert(source, *options, out=tmp_path / "out")
    assert resumed.exit_code == 0, resumed.output  # with these numbers, as the sentence says


def test_statistics_are_saved_next_to_a_users_partial_file(tmp_path: Path) -> None:
    (tmp_path / "s.safetensors.partial").write_text("mine")
    options = (*SELF, "--save-statistics", str(tmp_path / "s.safetensors"))
    assert convert(make(tmp_path / "source"), *options, out=tmp_path / "out").exit_code == 0
    assert (tmp_path / "s.safetensors.partial").read_text() == "mine"


def test_an_evaluation_leaves_the_users_names_alone(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "e.json", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (tmp_path / "e.json.new").symlink_to(elsewhere)
    with reserved(out) as (journal, write):
        journal.begin({})
        journal.keep("ppl/student", 1)
        write("{}")
    assert (out.read_text(), elsewhere.read_text()) == ("{}", "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.json", "e.json.new", "elsewhere"]


@pytest.mark.parametrize("report", ["{}", '{"of": "another evaluation"}'])
def test_a_journal_that_a_kill_left_next_to_its_report_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    """The next start removes it, unless it does not belong to this very report."""
    out = tmp_path / "e.json"

    def killed(file: Path, content: str) -> None:
        write_whole(file, content)
        raise KeyboardInterrupt

    with reserved(out) as (journal, write):
        journal.begin({})
        journal.keep("ppl/student", 1)
        monkeypatch.setattr("kvfold.eval.evaluation_journal.write_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            write("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.json", "e.json.partial"]
    out.write_text(report)
    with pytest.raises(InvalidInput, match="exists; name another file"), reserved(out):
        pytest.fail("the report exists")
    left = ["e.json"] if report == "{}" else ["e.json", "e.json.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_second_evaluation_of_one_out_says_so(tmp_path: Path) -> None:
    with reserved(tmp_path / "e.json") as (journal, _):
        journal.begin({})
        journal.keep("ppl/student", 1)
        before = content(tmp_path)
        with (
            pytest.raises(InvalidInput, match=r"--out .*e\.json: another kvfold is writing it; wait for it"),
            reserved(tmp_path / "e.json"),
        ):
            pytest.fail("two evaluations write one file")
        assert content(tmp_path) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a write that fails the system names no file."""
    journal = EvaluationJournal(tmp_path / "e.json.partial")
    journal.begin({})
    monkeypatch.setattr(journal, "_file", Path("/dev/full"))
    with pytest.raises(InvalidInput, match=r"/dev/full cannot be written: No space left on device; "):
        journal.keep("ppl/student", 1)
