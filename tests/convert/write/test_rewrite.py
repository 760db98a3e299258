"""The path from directory to directory: what passes through, what is refused, what a kill leaves."""

import errno
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvfold.checkpoints import shards
from kvfold.checkpoints.shards import INDEX, read_header
from kvfold.convert.cli import main
from kvfold.convert.decide import preparation
from kvfold.convert.write import rewrite
from kvfold.convert.write.fold_journal import JOURNAL
from kvfold.core.disk import check_room

from ...support.folds import GQA, MLA, convert
from ...support.tiny import make, same_bytes
from ...support.warm_python import warm_python


def weights(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("options", [GQA, ("--to", "mqa", "--calibration", "none"), MLA])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_only_attention_changes(tmp_path: Path, family: str, options: tuple[str, ...]) -> None:
    """Every other tensor passes through byte by byte, the tokenizer and the chat template come along, the
    source stays.
    """
    source = make(tmp_path / "source", family, dtype=torch.bfloat16, shard_size="20KB")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    result = convert(source, *options)
    assert result.exit_code == 0, result.output
    out = tmp_path / "out"
    old, new = weights(source), weights(out)
    untouched = {name for name in old if "self_attn" not in name}
    assert untouched == {name for name in new if "self_attn" not in name}
    assert all(torch.equal(old[name].view(torch.int16), new[name].view(torch.int16)) for name in untouched)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == before[name]
    assert before == {path.name: path.read_bytes() for path in source.iterdir()}
    record = json.loads((out / "kvfold.json").read_text())
    assert record["source"]["path"] == str(source)
    assert record["target"]["name"] == options[1]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("options", [GQA, (*GQA, "--method", "aligned"), MLA])
def test_twice_gives_the_same_bytes(tmp_path: Path, options: tuple[str, ...]) -> None:
    source = make(tmp_path / "source", "qwen2")
    for name in ("one", "two"):
        assert convert(source, *options, out=tmp_path / name).exit_code == 0
    assert same_bytes(tmp_path / "one", tmp_path / "two") == []


def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    assert convert(source, *MLA, out=tmp_path / "one").exit_code == 0
    assert convert(source, *MLA, "--shard-size", "20KB", out=tmp_path / "many").exit_code == 0
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.values())
    for file in files:
        with safe_open(tmp_path / "many" / file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            assert all(index["weight_map"][name] == file for name in set(shard.keys()))


def test_float16_becomes_bfloat16_for_mla_only(tmp_path: Path) -> None:
    source = make(tmp_path / "source", dtype=torch.float16)
    result = convert(source, *MLA, out=tmp_path / "mla")
    assert "float16 cannot hold" in result.stderr
    assert {t.dtype for t in weights(tmp_path / "mla").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "mla" / "config.json").read_text())["dtype"] == "bfloat16"
    assert convert(source, *GQA, out=tmp_path / "gqa").exit_code == 0
    assert {t.dtype for t in weights(tmp_path / "gqa").values()} == {torch.float16}


def test_each_tensor_is_read_once_and_one_layer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "source", num_hidden_layers=3)
    seen: list[tuple[str, int, int]] = []
    read = shards.read_flat

    def spy(entry: shards.Entry, first: int, count: int) -> torch.Tensor:
        seen.append((str(entry.start), first, count))
        return read(entry, first, count)

    monkeypatch.setattr("kvfold.checkpoints.directory.read_flat", spy)
    monkeypatch.setattr("kvfold.checkpoints.directory.PIECE", 500)
    assert convert(source, *MLA).exit_code == 0
    assert len(seen) == len(set(seen))
    assert sum(count for _, _, count in seen) == sum(t.numel() for t in weights(source).values())


KILLED = """
import pathlib, sys, time
from kvfold.convert.write import rewrite
from kvfold.convert.cli import main
from kvfold.convert.decide import preparation
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
    assert "out.partial holds config.json, which kvfold did not write; move it" in refused.stderr
    assert theirs.read_text() == "years of work"
    second.unlink()
    for name in ("LICENSE.old", "other_kvfold.py"):
        (partial / name).write_text("")
    assert convert(source, *MLA).exit_code == 0
    assert not {"LICENSE.old", "other_kvfold.py"} & {path.name for path in (tmp_path / "out").iterdir()}


def test_values_that_the_dtype_does_not_hold_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "source", dtype=torch.float16)
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if "self_attn" in name:
            tensors[name] = tensors[name] * 2**14
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    result = convert(source, "--to", "mqa", "--calibration", "none")
    assert result.exit_code == 2
    assert "has values that float16 does not hold; write another --dtype" in result.output
    assert not (tmp_path / "out.partial").exists()


def test_leftovers_of_another_plan_are_not_resumed(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / JOURNAL).write_text(f'"{"0" * 64}"\n"layer 0"\n"layer 1"\n')
    (partial / "model.safetensors").write_bytes(b"old")
    assert convert(source, *MLA).exit_code == 0
    assert convert(source, *MLA, out=tmp_path / "clean").exit_code == 0
    assert same_bytes(tmp_path / "out", tmp_path / "clean") == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "source")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    result = convert(source, *MLA)
    assert result.exit_code == 2
    assert "no space left, the output takes" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_disk_that_is_too_small_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, usage = make(tmp_path / "source"), shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
        patch.setattr(preparation, "study", None)  # no text is read
        result = convert(source, *MLA, "--calibration", "self")
        assert result.exit_code == 2
        assert re.search(r"out takes 0\.\d MB, and the disk of .* has 0\.0 MB free; make room", result.output)
        # What an earlier run has written of it takes no more room.
        (tmp_path / "out.partial").mkdir()
        (tmp_path / "out.partial" / "model.safetensors").write_bytes(bytes(10**6))
        check_room(tmp_path / "out", 10**6, tmp_path / "out.partial")
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(total=0, free=0))
        check_room(tmp_path / "out", 10**9, tmp_path / "out.partial")


def test_nan_weights_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        tensors = load_file(source / "model.safetensors")
        broken = tensors | {name: tensors[name].clone()}
        broken[name][3, 3] = float("nan")
        save_file(broken, source / "model.safetensors", {"format": "pt"})
        result = convert(source, *MLA)
        assert result.exit_code == 2
        assert f"{name} of {source} holds NaN or infinite values" in result.output
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
        save_file(tensors, source / "model.safetensors", {"format": "pt"})


def test_dry_run_writes_nothing_and_says_what_would_be(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    out = tmp_path / "out"
    text = convert(source, *MLA, "--dry-run")
    assert text.exit_code == 0
    assert "cache after" in text.output
    plan = json.loads(convert(source, *MLA, "--dry-run", "--json").stdout)
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    assert plan["cache"]["before"]["elements_per_token_per_layer"] == 2 * 8 * 8
    assert plan["cache"]["after"]["elements_per_token_per_layer"] == 24 + 4
    assert convert(source, *MLA).exit_code == 0
    assert plan["output_bytes"] == sum(t.nbytes for t in weights(out).values())


def test_a_fold_that_keeps_all_heads_says_that_it_saves_nothing(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    for heads, count in (("8", 1), ("4", 0)):
        plan = convert(source, "--to", "gqa", "--kv-heads", heads, "--dry-run", "--json")
        notices = json.loads(plan.stdout)["notices"]
        assert sum("as many as the source, so its cache is not smaller" in text for text in notices) == count


def test_json_is_one_object(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    result = convert(source, *GQA, "--json")
    assert json.loads(result.stdout)["target"] == {"name": "gqa", "num_key_value_heads": 2}
