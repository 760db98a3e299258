"""A source that is no longer what a checkpoint was made of is told, since numbers are relative to it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kvfold.checkpoints.record import other_weights, read_record, write_record
from kvfold.convert.cli import main as convert
from kvfold.core.errors import InvalidInput
from kvfold.engines.cli import main as verify
from kvfold.engines.verify import verify as check
from kvfold.eval import subject
from kvfold.eval.cli import main as evaluate
from kvfold.eval.suites import perplexity
from kvfold.texts.corpus import read_text

from ..support.commands import run_main
from .conftest import Make


@pytest.mark.usefixtures("warm_probe")
def test_a_source_that_has_changed_is_told(make: Make, tmp_path: Path) -> None:
    source, out, text = make(seed=11), tmp_path / "out", tmp_path / "text.txt"
    text.write_bytes(b"one line\r\nand another\r\n" * 20)
    command = [str(source), "--to", "mqa", "--calibration", "none", "--verify", "none", "--out", str(out)]
    assert CliRunner().invoke(convert, command).exit_code == 0
    measure = [str(out), "--text", str(text), "--window", "32", "--suite", "ppl"]
    assert "has changed" not in CliRunner().invoke(evaluate, measure).output
    assert "is not what" not in CliRunner().invoke(verify, [str(out)]).output
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 1.3
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    done = run_main("eval", *measure)
    assert f"{source} has changed since {out} was made from it: model.safetensors differs" in done.output
    done = CliRunner().invoke(verify, [str(out)])
    assert (
        f"{source} is not what {out} was made of: kvfold.json records another model.safetensors"
        in done.output
    )


@pytest.mark.usefixtures("warm_probe")
def test_weights_that_another_tool_trained_are_reported(make: Make, tmp_path: Path) -> None:
    source, out, text = make(seed=12), tmp_path / "out", tmp_path / "text.txt"
    text.write_text("one line and another\n" * 20)
    command = [str(source), "--to", "mqa", "--calibration", "none", "--verify", "none", "--out", str(out)]
    assert CliRunner().invoke(convert, command).exit_code == 0
    measure = [str(out), "--text", str(text), "--window", "32", "--suite", "ppl"]
    sentence = f"weights of {out} are not those that its kvfold.json describes (model.safetensors differs)"
    assert sentence not in CliRunner().invoke(evaluate, measure).output
    report = check(out)
    assert ("weights", True) in [(each.name, each.passed) for each in report.checks]
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.3
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert sentence in run_main("eval", *measure).output
    report = check(out)
    [found] = [each for each in report.checks if each.name == "weights"]
    assert found.detail.startswith(f"the {sentence}")
    assert found.passed is None
    assert not report.failures, "training with another tool is no failure"


@pytest.mark.parametrize("when", ["before the weights are loaded", "while suites are measured"])
def test_numbers_of_other_weights_are_not_recorded(
    when: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity in a report is that of the weights that were read."""
    model, other, text = make(seed=13), make(seed=14), tmp_path / "text.txt"
    text.write_text("one line and another\n" * 20)
    place, name = (subject, "load") if when.startswith("before") else (perplexity, "measure")
    real = getattr(place, name)

    def exchange(*given: Any, **named: Any) -> Any:
        shutil.copyfile(other / "model.safetensors", model / "model.safetensors")
        return real(*given, **named)

    monkeypatch.setattr(place, name, exchange)
    words = ["--text", str(text), "--window", "32", "--suite", "ppl", "--out", str(tmp_path / "e.json")]
    done = run_main("eval", model, *words, code=2)
    assert f"{model / 'model.safetensors'} changed while it was read; run the same command" in done.stderr
    assert not (tmp_path / "e.json").exists()


def test_the_files_that_hold_the_weights_count(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2)}
    whole, shard = tmp_path / "model.safetensors", tmp_path / "model-00001-of-00001.safetensors"
    save_file(tensors, whole)
    assert not other_weights(tmp_path), "there is no record"
    source = {"name": "source", "path": "/source"}
    record = write_record(tmp_path, {"schema": 1, "stage": "convert", "source": source, "parents": []})
    assert record == read_record(tmp_path)
    assert not other_weights(tmp_path)
    save_file(tensors, tmp_path / "statistics.safetensors")
    assert not other_weights(tmp_path), "the model is not read from it"
    whole.rename(shard)
    index = {"metadata": {}, "weight_map": {"a": shard.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"({shard.name} is not described)" in other_weights(tmp_path)
    (tmp_path / "statistics.safetensors").unlink()
    write_record(tmp_path, record)
    assert not other_weights(tmp_path)
    shard.write_bytes(shard.read_bytes()[:-1])
    told = f"({shard.name} differs): they were trained, changed, saved again by another tool or damaged after"
    assert told in other_weights(tmp_path)
    shard.unlink()
    with pytest.raises(InvalidInput, match="lacks the shard"):
        other_weights(tmp_path)


def test_line_ends_are_scored_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "crlf.txt"
    path.write_bytes(b"one\r\ntwo\n")
    assert read_text(str(path)).joined == "one\r\ntwo\n"
