"""The path from directory to directory: what passes through, what is refused, what a kill leaves."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvfold.checkpoints import shards
from kvfold.checkpoints.shards import INDEX
from kvfold.convert.settle import preparation
from kvfold.core.disk import check_room

from ...support.folds import GQA, MLA, convert
from ...support.tiny import make, same_bytes


def weights(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("options", [GQA, ("--to", "mqa", "--calibration", "none"), MLA])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_only_attention_changes(tmp_path: Path, family: str, options: tuple[str, ...]) -> None:
    """Every other tensor, the tokenizer and the chat template pass through; the source stays."""
    source = make(tmp_path / "source", family, dtype=torch.bfloat16, shard_size="20KB")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    convert(source, *options, code=0)
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


def test_each_tensor_is_read_once_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source", num_hidden_layers=3)
    seen: list[tuple[str, int, int]] = []
    read = shards.read_flat

    def spy(entry: shards.Entry, first: int, count: int) -> torch.Tensor:
        seen.append((str(entry.start), first, count))
        return read(entry, first, count)

    monkeypatch.setattr("kvfold.checkpoints.directory.read_flat", spy)
    monkeypatch.setattr("kvfold.checkpoints.directory.PIECE", 500)
    # A norm that is fitted by weights alone reads embeddings too.
    assert convert(source, *MLA, "--latent-norm", "linear").exit_code == 0
    assert len(seen) == len(set(seen))
    assert sum(count for _, _, count in seen) == sum(t.numel() for t in weights(source).values())


def test_values_that_the_dtype_does_not_hold_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "source", dtype=torch.float16)
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if "self_attn" in name:
            tensors[name] = tensors[name] * 2**14
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    result = convert(source, "--to", "mqa", "--calibration", "none", code=2)
    assert "has values that float16 does not hold; write another --dtype" in result.output
    assert not (tmp_path / "out.partial").exists()


def test_a_full_disk_is_a_sentence_and_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    assert "no space left, the output takes" in convert(source, *MLA, code=2).output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_small_disk_is_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, usage = make(tmp_path / "source"), shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
        patch.setattr(preparation, "study", None)  # no text is read
        result = convert(source, *MLA, "--calibration", "self", code=2)
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
        assert f"{name} of {source} holds NaN or infinite values" in convert(source, *MLA, code=2).output
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
        save_file(tensors, source / "model.safetensors", {"format": "pt"})


def test_dry_run_writes_nothing_and_says_what_would_be(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    out = tmp_path / "out"
    assert "cache after" in convert(source, *MLA, "--dry-run", code=0).output
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
