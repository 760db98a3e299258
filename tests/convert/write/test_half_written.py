"""What a killed fold leaves: what is taken over from it, and what is not."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvfold.checkpoints.shards import read_header
from kvfold.convert.cli import main
from kvfold.convert.settle import preparation
from kvfold.convert.write import rewrite
from kvfold.core.work import JOURNAL

from ...support.commands import run_main
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
        assert process.stdout.readline() == b"reached\n"
        process.kill()
        process.communicate()


def test_a_killed_run_has_no_output_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source", num_hidden_layers=4)
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert convert(source, *MLA, out=whole).exit_code == 0
    arguments = [warm_python(), "-c", KILLED, str(source), *MLA, "--out", str(out)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"reached\n"
        # Alive, it holds the half-written directory: a second run must not mix into it.
        assert "another kvfold is at work in" in convert(source, *MLA, out=out, code=2).output
        with monkeypatch.context() as patched:  # and it is refused before it reads a text
            patched.setattr(preparation, "study", lambda *_, **__: pytest.fail("statistics were taken"))
            second = convert(source, "--to", "mqa", "--calibration", "self", out=out)
        assert "another kvfold is at work in" in second.output
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


def test_what_a_kill_after_the_last_name_leaves_goes_with_the_next_command(tmp_path: Path) -> None:
    source, out = make(tmp_path / "source"), tmp_path / "out"
    words = [str(source), *GQA, "--calibration", "none", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvfold.core.work.WorkDir.discard", lambda _: [])
        assert CliRunner().invoke(main, words).exit_code == 0
    assert (tmp_path / "out.partial" / JOURNAL).is_file()
    whole = Path(shutil.copytree(out, tmp_path / "whole"))
    assert "out exists and nothing is overwritten" in run_main("convert", *words, code=2).stderr
    assert same_bytes(out, whole) == []
    assert not (tmp_path / "out.partial").exists()


def test_finished_layers_of_a_fold_with_other_options_are_kept(tmp_path: Path) -> None:
    """They may be hours of work: another command neither takes nor removes them, and names what differs."""
    source = make(tmp_path / "source", num_hidden_layers=4)
    out, whole, partial = tmp_path / "out", tmp_path / "whole", tmp_path / "out.partial"
    kill_after_two_layers(source, *MLA, "--out", str(out))
    before = {path.name: path.read_bytes() for path in partial.iterdir() if path.is_file()}
    refused = convert(source, *MLA, "--shard-size", "20KB", out=out, code=2)
    assert "finished parts of another command, which differs in --shard-size; " in refused.stderr
    other = convert(make(tmp_path / "other", num_hidden_layers=4), *MLA, out=out, code=2)
    assert "which differs in the source" in other.stderr
    (partial / JOURNAL).rename(partial / "journal-1.jsonl")
    head = before[JOURNAL].decode().splitlines()[0]
    (partial / JOURNAL).write_text(f"{head}\n")
    convert(source, *MLA, "--shard-size", "20KB", out=out, code=2)
    (partial / "journal-1.jsonl").replace(partial / JOURNAL)
    kept = {path.name: path.read_bytes() for path in partial.iterdir() if path.is_file()}
    assert before == {name: content for name, content in kept.items() if name != "lock-1"}
    config = source / "config.json"  # as of a source that was downloaded anew
    os.utime(config, ns=(config.stat().st_atime_ns, config.stat().st_mtime_ns + 1))
    again = convert(source, *MLA, out=out, code=0)
    assert f"{partial} is begun anew: it was begun with other input files" in again.output
    assert convert(source, *MLA, out=whole).exit_code == 0
    assert same_bytes(out, whole) == []


def test_other_options_are_refused_before_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take hours for a large model; the same options resume, and take the same statistics."""
    source, out, whole = make(tmp_path / "source", num_hidden_layers=4), tmp_path / "out", tmp_path / "whole"
    words = [
        str(source),
        *["--to", "mla", "--rank", "9", "--length", "12", "--sequences", "4", "--refine", "0"],
    ]
    kill_after_two_layers(*words, "--out", str(out))
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "study", lambda *args, **options: pytest.fail("statistics were taken"))
        refused = CliRunner().invoke(main, [*words, "--effort", "quick", "--seed", "1", "--out", str(out)])
    assert refused.exit_code == 2, refused.output
    assert "finished parts of another command, which differs in --effort" in refused.stderr
    assert ", --seed" in refused.stderr
    assert CliRunner().invoke(main, [*words, "--out", str(out)]).exit_code == 0
    assert CliRunner().invoke(main, [*words, "--out", str(whole)]).exit_code == 0
    assert same_bytes(out, whole) == []


def test_a_missing_shard_is_not_resumed_over(tmp_path: Path) -> None:
    """The journal says what is written, but only of the files it was written with."""
    source = make(tmp_path / "source", num_hidden_layers=4)
    out, whole, small = tmp_path / "out", tmp_path / "whole", ("--shard-size", "20KB")
    assert convert(source, *MLA, *small, out=whole).exit_code == 0
    kill_after_two_layers(source, *MLA, *small, "--out", str(out))
    sorted((tmp_path / "out.partial" / "model").glob("*.safetensors"))[0].unlink()
    assert convert(source, *MLA, *small, out=out).exit_code == 0
    assert same_bytes(out, whole) == []


def test_changed_finished_parts_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk or another program may have changed them since the kill."""
    source = make(tmp_path / "source", num_hidden_layers=4)
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert convert(source, *MLA, out=whole).exit_code == 0
    kill_after_two_layers(source, *MLA, "--out", str(out))
    weights = tmp_path / "out.partial" / "model" / "model.safetensors"
    places = read_header(weights)
    with weights.open("r+b") as stream:
        for name in ("model.layers.1.self_attn.o_proj.weight", "model.embed_tokens.weight"):
            stream.seek(places[name].start)
            stream.write(b"changed")
    folded = []
    fold = rewrite.fold
    monkeypatch.setattr(rewrite, "fold", lambda plan, number: (folded.append(number), fold(plan, number))[1])
    again = convert(source, *MLA, out=out, code=0)
    assert "finished parts of the half-written output have changed since they were written" in again.stderr
    assert folded == [1, 2, 3]
    assert same_bytes(out, whole) == []


def test_only_what_is_needed_of_a_half_written_output_is_kept(tmp_path: Path) -> None:
    """A second name of a user's file would be written through; a source may have lost what was copied."""
    source, partial = make(tmp_path / "source", num_hidden_layers=4), tmp_path / "out.partial"
    kill_after_two_layers(source, *MLA, "--out", str(tmp_path / "out"))
    shutil.copytree(partial, tmp_path / "kept", copy_function=os.link)
    linked = convert(source, *MLA, code=2)
    assert "model.safetensors has a second name, a hard link, which would change too; remove" in linked.stderr
    assert (tmp_path / "kept" / "model" / "model.safetensors").is_file()
    for name in ("LICENSE.old", "other_kvfold.py"):
        (tmp_path / "kept" / "model" / name).write_text("")
    shutil.copytree(tmp_path / "kept", partial, dirs_exist_ok=True)
    assert convert(source, *MLA).exit_code == 0
    assert not {"LICENSE.old", "other_kvfold.py"} & {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(("place", "told"), [
    ("kvfold.convert.calibration.study._collect", "1 of 1 batches were written before"),
    ("kvfold.convert.settle.preparation.settle", "the statistics of the interrupted run are used"),
    ("kvfold.convert.write.rewrite.fold", "the statistics of the interrupted run are used"),
])  # fmt: skip
def test_text_and_statistics_survive_an_interruption(tmp_path: Path, place: str, told: str) -> None:
    """They can take longer than the fold. A rerun takes them up, and ends in the same bytes."""
    source, out, whole = make(tmp_path / "source"), tmp_path / "out", tmp_path / "whole"
    words = ["--to", "mla", "--rank", "9", "--length", "12", "--sequences", "4", "--refine", "0"]
    assert convert(source, *words, out=whole).exit_code == 0
    calls = []

    def interrupted(*given: Any, **more: Any) -> Any:
        calls.append(given)
        if place.endswith("settle") and len(calls) == 1:  # the draft by weights alone
            return settle(*given, **more)
        raise KeyboardInterrupt

    settle = preparation.settle
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place, interrupted)
        assert convert(source, *words, out=out).exit_code == 130
    assert (tmp_path / "out.partial").is_dir()
    assert told in convert(source, *words, out=out, code=0).output
    assert same_bytes(out, whole) == []
    assert not (tmp_path / "out.partial").exists()
