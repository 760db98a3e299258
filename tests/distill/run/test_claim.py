"""The working directory next to the output.

What is not kvfold's is not touched, and a refused recipe leaves nothing.
"""

import json
import signal
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.core.errors import InvalidInput
from kvfold.core.signals import Interrupted
from kvfold.distill.cli import main
from kvfold.distill.run import export
from kvfold.distill.run.job import distill

from ...support.distillation import stop_at
from ...support.tokenizers import save_tokenizer
from ..conftest import MakeRecipe


def content(directory: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


def test_an_empty_directory_and_what_a_kill_left_are_taken_over(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    (tmp_path / "one.partial").mkdir(mode=0o700)
    (tmp_path / "two.partial" / "state" / "step-00000001.partial").mkdir(parents=True)
    for name in ("lock", "tokens.bin", "tokens.bin.partial", "metrics.jsonl", "metrics.jsonl.partial"):
        (tmp_path / "two.partial" / name).write_text("" if name == "lock" else "cut off")
    for name in ("one", "two"):
        distill(make_recipe(output=str(tmp_path / name), tokens=192))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_what_somebody_puts_there_meanwhile_stays(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = export.publish

    def publish_and_write(saved: Path, student: Path, directory: Path) -> None:
        publish(saved, student, directory)
        (tmp_path / "out.partial" / "notes").write_text("mine")

    monkeypatch.setattr(export, "publish", publish_and_write)
    distill(make_recipe(tokens=192))
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == ["notes"]


def test_a_refused_recipe_leaves_nothing(
    make_recipe: MakeRecipe, teacher: Path, text: Path, tmp_path: Path
) -> None:
    other, data = tmp_path / "other", tmp_path / "bad.jsonl"
    LlamaForCausalLM(LlamaConfig.from_pretrained(teacher)).save_pretrained(other)
    save_tokenizer(other, last="stop")
    data.write_text(json.dumps({"body": "x" * 100}))
    before = content(tmp_path)
    for changes, message in (
        ({"data": {"source": str(text), "seq_len": 128}}, "exceeds the 64 positions"),
        ({"data": {"source": str(data), "seq_len": 32}}, "has no field"),
        ({"teacher": str(other)}, "different tokenizers"),
        ({"lr": 100, "weight_decay": 100, "grad_clip": None, "warmup": 0}, "diverged"),
    ):
        with pytest.raises(InvalidInput, match=message):
            distill(make_recipe(output=str(tmp_path / "new" / "deep" / "out"), **changes))
        assert content(tmp_path) == before


def test_a_refusal_keeps_what_was_saved(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGTERM)
        with pytest.raises(Interrupted):
            distill(make_recipe())
    before = content(tmp_path)
    with pytest.raises(InvalidInput, match="the recipe differs"):
        distill(make_recipe(lr=1e-3))
    assert content(tmp_path) == before


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc, where nobody can make a directory")
def test_a_place_that_cannot_be_written_is_one_sentence(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(make_recipe(output="/proc/x").resolved()), encoding="utf-8")
    result = CliRunner().invoke(main, [str(file)], catch_exceptions=False)
    assert result.exit_code == 2
    assert "Error: cannot write /proc/x" in result.stderr.splitlines()[-1]
