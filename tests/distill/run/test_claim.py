"""The working directory next to the output: only kvfold's is touched, and a refused recipe leaves nothing."""

import json
from pathlib import Path

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.distill.run import export
from kvfold.distill.run.job import distill

from ...support.distillation import another, command, interrupt, write_recipe
from ..conftest import MakeRecipe


def content(directory: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


def test_empty_directories_and_what_a_kill_left_are_taken(make_recipe: MakeRecipe, tmp_path: Path) -> None:
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


def test_a_refusal_leaves_none(make_recipe: MakeRecipe, teacher: Path, text: Path, tmp_path: Path) -> None:
    other, data = another(teacher, tmp_path / "other", last="stop"), tmp_path / "bad.jsonl"
    data.write_text(json.dumps({"body": "x" * 100}))
    before = content(tmp_path)
    for changes, message in (
        ({"data": {"source": str(text), "seq_len": 128}}, r"data\.seq_len 128 exceeds the 64 positions"),
        ({"data": {"source": str(data), "seq_len": 32}}, "has no field"),
        ({"teacher": str(other)}, "different tokenizers"),
        # Each step multiplies weights by about -10,000; which of the ten overflows first depends on the
        # processor.
        ({"lr": 100, "weight_decay": 100, "grad_clip": None, "warmup": 0},
         r"stage kl diverged: the gradient of step \d+ is (nan|inf); use"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=message):
            distill(make_recipe(output=str(tmp_path / "new" / "deep" / "out"), **changes))
        assert content(tmp_path) == before


def test_a_refusal_keeps_what_was_saved(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    interrupt(make_recipe(), 3)
    before = content(tmp_path)
    with pytest.raises(InvalidInput, match="the recipe differs"):
        distill(make_recipe(lr=1e-3))
    assert content(tmp_path) == before


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc, where nobody can make a directory")
def test_a_place_that_cannot_be_written_is_one_sentence(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    result = command(write_recipe(make_recipe(output="/proc/x"), tmp_path / "recipe.yaml"), code=2)
    assert "Error: cannot write /proc/x" in result.stderr.splitlines()[-1]
