"""What a killed fold leaves: what is taken over from it, and what is not."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvfold.checkpoints.shards import read_header
from kvfold.convert.cli import main
from kvfold.convert.settle import preparation
from kvfold.convert.write import rewrite
from kvfold.convert.write.fold_journal import JOURNAL

from ...support.folds import GQA, MLA, convert
from ...support.tiny import make, same_bytes
from ...support.warm_python import warm_python

KILLED = """
import pathlib, sys, time
from kvfold.convert.write import rewrite
from kvfold.convert.cli import main
from kvfold.convert.settle import preparation
fold = rewrite.fold
def slow(plan, number):
    if number == 2:
        while '"layer 1"' not in pathlib.Path(sys.argv[-1] + ".partial/journal.jsonl").read_text():
            time.sleep(0.01)
        print("reached", flush=True)
        time.sleep(60)
    return fold(plan, number)
rewrite.fold = slow
main(sys.argv[1:])
"""


def kill_after_two_layers(*arguments: str | Path) -> None:
    """Run a fold that is killed when its layers 0 and 1 are in the journal."""
    words = [warm_python(), "-c", KILLED, *map(str, arguments)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reached\n"
        process.kill()
        process.communicate()


def test_a_killed_run_leaves_no_output_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "source", num_hidden_layers=4)
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert convert(source, *MLA, out=whole).exit_code == 0
    arguments = [warm_python(), "-c", KILLED, str(source), *MLA, "--out", str(out)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reached\n"
        # Alive, it holds the half-written directory: a second run must not mix into it.
        second = convert(source, *MLA, out=out)
        assert second.exit_code == 2
        assert "another kvfold is writing" in second.output
        with monkeypatch.context() as patched:  # and it is refused before it reads a text
            patched.setattr(preparation, "study", lambda *_, **__: pytest.fail("statistics were taken"))
            second = convert(source, "--to", "mqa", "--calibration", "self", out=out)
        assert "another kvfold is writing" in second.output
        process.kill()
        process.communicate()
    assert not out.exists()
    assert (tmp_path / "out.partial").is_dir()
    folded = []
    fold = rewrite.fold
    monkeypatch.setattr(rewrite, "fold", lambda plan, number: (folded.append(number), fold(plan, number))[1])
    assert convert(source, *MLA, out=out).exit_code == 0
    assert folded == [2, 3], "the finished layers were folded again"
    assert same_bytes(out, whole) == []


def test_an_output_that_lacks_only_its_name_gets_it(tmp_path: Path) -> None:
    """A kill between the removal of the journal and the renaming leaves that."""
    source, out = make(tmp_path / "source"), tmp_path / "out"
    words = [str(source), *GQA, "--calibration", "none", "--out", str(out)]
    assert CliRunner().invoke(main, words).exit_code == 0
    whole = Path(shutil.copytree(out, tmp_path / "whole"))
    out.rename(tmp_path / "out.partial")
    other = CliRunner().invoke(main, [*words, "--shard-size", "20KB"])
    assert other.exit_code == 2
    assert "not a half-written output" in other.stderr
    weights = tmp_path / "out.partial" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    changed = CliRunner().invoke(main, words)
    assert changed.exit_code == 2
    assert f"remove {tmp_path / 'out.partial'} and run the same command again" in changed.stderr
    weights.write_bytes(content)
    assert CliRunner().invoke(main, words).exit_code == 0
    assert same_bytes(out, whole) == []
    assert not (tmp_path / "out.partial").exists()


def test_finished_layers_of_a_fold_with_other_options_are_kept(tmp_path: Path) -> None:
    """They may be hours of work: another command neither takes nor removes them, and names what differs."""
    source = make(tmp_path / "source", num_hidden_layers=4)
    out, whole, partial = tmp_path / "out", tmp_path / "whole", tmp_path / "out.partial"
    kill_after_two_layers(source, *MLA, "--out", str(out))
    before = {path.name: path.read_bytes() for path in partial.iterdir()}
    refused = convert(source, *MLA, "--shard-size", "20KB", out=out)
    assert refused.exit_code == 2
    assert f"{partial} holds 2 finished layers of a fold with another --shard-size; " in refused.stderr
    other = convert(make(tmp_path / "other", num_hidden_layers=4), *MLA, out=out)
    assert other.exit_code == 2
    assert f"of a fold of another source ('{source}')" in other.stderr
    (partial / JOURNAL).rename(partial / "journal-1.jsonl")
    head, options = before[JOURNAL].decode().splitlines()[:2]
    (partial / JOURNAL).write_text(f"{head}\n{options}\n")
    every = convert(source, *MLA, "--shard-size", "20KB", out=out)
    assert every.exit_code == 2, "the layers of every process count"
    (partial / "journal-1.jsonl").replace(partial / JOURNAL)
    assert before == {path.name: path.read_bytes() for path in partial.iterdir() if path.name != "lock-1"}
    config = source / "config.json"  # as of a source that was downloaded anew
    os.utime(config, ns=(config.stat().st_atime_ns, config.stat().st_mtime_ns + 1))
    again = convert(source, *MLA, out=out)
    assert again.exit_code == 0
    assert f"the fold starts over: {partial} held 2 finished layers by another version" in again.output
    assert convert(source, *MLA, out=whole).exit_code == 0
    assert same_bytes(out, whole) == []


def test_other_options_are_refused_before_statistics_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take hours for a large model; the same options resume, and take the same statistics."""
    source, out, whole = make(tmp_path / "source", num_hidden_layers=4), tmp_path / "out", tmp_path / "whole"
    words = [str(source), "--to", "mla", "--rank", "9", "--length", "12", "--sequences", "4"]
    kill_after_two_layers(*words, "--out", str(out))
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "study", lambda *args, **options: pytest.fail("statistics were taken"))
        refused = CliRunner().invoke(main, [*words, "--effort", "quick", "--seed", "1", "--out", str(out)])
    assert refused.exit_code == 2, refused.output
    assert "holds 2 finished layers of a fold with another --effort, --seed" in refused.stderr
    assert CliRunner().invoke(main, [*words, "--out", str(out)]).exit_code == 0
    assert CliRunner().invoke(main, [*words, "--out", str(whole)]).exit_code == 0
    assert same_bytes(out, whole) == []


def test_a_missing_shard_is_not_resumed_over(tmp_path: Path) -> None:
    """The journal says what is written, but only of the files it was written with."""
    source = make(tmp_path / "source", num_hidden_layers=4)
    out, whole, small = tmp_path / "out", tmp_path / "whole", ("--shard-size", "20KB")
    assert convert(source, *MLA, *small, out=whole).exit_code == 0
    kill_after_two_layers(source, *MLA, *small, "--out", str(out))
    sorted((tmp_path / "out.partial").glob("*.safetensors"))[0].unlink()
    assert convert(source, *MLA, *small, out=out).exit_code == 0
    assert same_bytes(out, whole) == []


def test_finished_parts_that_have_changed_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk or another program may have changed them since the kill."""
    source = make(tmp_path / "source", num_hidden_layers=4)
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert convert(source, *MLA, out=whole).exit_code == 0
    kill_after_two_layers(source, *MLA, "--out", str(out))
    weights = tmp_path / "out.partial" / "model.safetensors"
    places = read_header(weights)
    with weights.open("r+b") as stream:
        for name in ("model.layers.1.self_attn.o_proj.weight", "model.embed_tokens.weight"):
            stream.seek(places[name].start)
            stream.write(b"changed")
    folded = []
    fold = rewrite.fold
    monkeypatch.setattr(rewrite, "fold", lambda plan, number: (folded.append(number), fold(plan, number))[1])
    again = convert(source, *MLA, out=out)
    assert again.exit_code == 0
    assert "finished parts of the half-written output have changed since they were written" in again.stderr
    assert folded == [1, 2, 3]
    assert same_bytes(out, whole) == []


def test_the_journal_of_an_earlier_version_is_not_trusted_and_not_refused(tmp_path: Path) -> None:
    """It has no checksums: its parts are written again, and other options than its own are still refused."""
    source, out = make(tmp_path / "source", num_hidden_layers=4), tmp_path / "out"
    assert convert(source, *MLA, out=tmp_path / "whole").exit_code == 0
    kill_after_two_layers(source, *MLA, "--out", str(out))
    journal = tmp_path / "out.partial" / "journal.jsonl"
    former = re.sub(r', "checksums": \{[^}]*\}|"checksums": \{[^}]*\}(, )?', "", journal.read_text())
    assert "checksums" in journal.read_text()
    assert "checksums" not in former
    journal.write_text(former)
    assert convert(source, *MLA, "--dtype", "bfloat16", out=out).exit_code == 2
    again = convert(source, *MLA, out=out)
    assert again.exit_code == 0
    assert "or are an earlier version's, and are written again" in again.stderr
    assert same_bytes(out, tmp_path / "whole") == []


def test_somebody_elses_directory_is_not_taken_over(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    theirs = tmp_path / "out.partial"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")
    result = convert(source, *MLA)
    assert result.exit_code == 2
    assert "is not a half-written output of kvfold" in result.output
    assert [path.name for path in theirs.iterdir()] == ["thesis.txt"]


def test_only_what_is_needed_of_a_half_written_output_is_kept(tmp_path: Path) -> None:
    """A second name of a user's file would be written through; a source may have lost what was copied."""
    source, partial = make(tmp_path / "source", num_hidden_layers=4), tmp_path / "out.partial"
    kill_after_two_layers(source, *MLA, "--out", str(tmp_path / "out"))
    theirs, second = tmp_path / "theirs.json", partial / "config.json"
    theirs.write_text("years of work")
    second.hardlink_to(theirs)
    refused = convert(source, *MLA)
    assert refused.exit_code == 2
    assert "out.partial holds config.json, whose second name, a hard link, would change too" in refused.stderr
    assert theirs.read_text() == "years of work"
    second.unlink()
    shutil.copytree(partial, tmp_path / "kept", copy_function=os.link)
    linked = convert(source, *MLA)
    assert linked.exit_code == 2
    assert (
        "holds model.safetensors, whose second name, a hard link, would change too; remove" in linked.stderr
    )
    shutil.rmtree(tmp_path / "kept")
    for name in ("LICENSE.old", "other_kvfold.py"):
        (partial / name).write_text("")
    assert convert(source, *MLA).exit_code == 0
    assert not {"LICENSE.old", "other_kvfold.py"} & {path.name for path in (tmp_path / "out").iterdir()}
