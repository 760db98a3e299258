"""A run that cannot train is refused before it begins: by the run, by `validate` and by `explain`."""

import os
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.distill import display
from kvfold.distill.parallel import launch
from kvfold.distill.run import job
from kvfold.distill.run.job import distill
from kvfold.distill.run.preflight import check_stages

from ...support.distillation import another, as_launched, command, refuses, write_recipe
from ...support.warm_python import warm_python
from ..conftest import MakeRecipe

FIRST = {"name": "first", "tokens": 192, "lr": 1e-3, "batch_tokens": 192, "train": "attention"}
DEEPER = "the student has 2 layers and the teacher 3"
# The second stage, keys of the recipe, what is told.
MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"losses": {"hidden_mse": 1}}, {"teacher": "deeper"},
     f"stage second: {DEEPER}; losses that compare layers need the same number"),
    ({"losses": {"attention_output": 1}}, {"teacher": "deeper"},
     f"stage second: {DEEPER}, so layers cannot be aligned"),
    ({"losses": {"attention_output": 1}}, {"teacher": "wider"},
     "32 numbers in a hidden state and the teacher 64, so layers cannot be aligned; use the source that"),
    ({"losses": {"hidden_cosine": 1}}, {"teacher": "wider"},
     "stage second: hidden_cosine compares vectors of one size"),
    ({"train": "lora", "lora": {"targets": ["nope"]}}, {},
     "stage second: lora.targets names nope, which is not a linear layer of the student; known: down_proj"),
    ({"train": "lora", "lora": {"targets": ["lm_head", "q_proj"]}}, {},
     "names lm_head, the output embedding, which cannot have an adapter"),
    ({"losses": {"attention_output": 1}, "train": "lora", "lora": {"targets": ["up_proj"]}}, {},
     "stage second: mode: layerwise trains only attention, but lora.targets names other layers"),
]  # fmt: skip


@pytest.fixture(scope="module")
def others(teacher: Path) -> Path:
    """Teachers that have one layer more, or wider ones."""
    another(teacher, teacher.parent / "others" / "deeper", num_hidden_layers=3)
    another(teacher, teacher.parent / "others" / "wider", hidden_size=64)
    return teacher.parent / "others"


@pytest.mark.parametrize(("second", "keys", "message"), MISTAKES)
def test_a_later_stages_mistake_is_told_before_the_first_is_trained(
    second: dict[str, Any],
    keys: dict[str, Any],
    message: str,
    make_recipe: MakeRecipe,
    others: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("peft")
    keys = {key: str(others / value) for key, value in keys.items()}
    recipe = make_recipe(stages=[FIRST, {**FIRST, **second, "name": "second"}], **keys)
    with monkeypatch.context() as patch:
        patch.setattr(job, "_open", lambda *_: pytest.fail("a stage was begun"))
        with pytest.raises(InvalidInput) as refused:
            distill(recipe)
    assert message in str(refused.value)
    assert not list(tmp_path.glob("out*"))
    file = write_recipe(recipe, tmp_path / "recipe.yaml")
    assert refuses(message, "validate", file)
    assert refuses(message, "explain", file)


@pytest.mark.parametrize("loss", ["kl", "attention_relation"])
def test_what_needs_no_width_runs(make_recipe: MakeRecipe, student: Path, others: Path, loss: str) -> None:
    recipe = make_recipe(losses={loss: 1}, teacher=str(others / "wider"))
    check_stages(recipe, student, others / "wider", sharded=True)
    distill(make_recipe(losses={loss: 1}, teacher=str(others / "wider"), tokens=192))


def test_a_shared_teacher_is_not_sharded(make_recipe: MakeRecipe, student: Path, teacher: Path) -> None:
    align = {**FIRST, "losses": {"attention_output": 1}}
    recipe = make_recipe(teacher="shared", stages=[align, {**FIRST, "name": "second"}])
    check_stages(recipe, student, teacher, sharded=False)
    with pytest.raises(InvalidInput, match=r"stage second: teacher: shared needs whole models in .*; write"):
        check_stages(recipe, student, teacher, sharded=True)
    check_stages(make_recipe(teacher="shared", stages=[align]), student, teacher, sharded=True)


@pytest.mark.parametrize(("profile", "code"), [("ddp", 0), ("fsdp2", 2), ("zero2", 2), ("zero3", 2)])
def test_validate_knows_the_profile(make_recipe: MakeRecipe, tmp_path: Path, profile: str, code: int) -> None:
    file = write_recipe(make_recipe(teacher="shared", train="attention"), tmp_path / "recipe.yaml")
    result = command("validate", file, "--set", f"profile={profile}", code=code)
    assert ("shared needs whole models in every process" in result.stderr) == (code == 2)


def test_launchers_that_shard_are_asked(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    align = {**FIRST, "losses": {"attention_output": 1}}
    with pytest.raises(InvalidInput, match="stage second: teacher: shared needs whole models"):
        distill(make_recipe(teacher="shared", stages=[align, {**FIRST, "name": "second"}]))


def test_text_of_the_teachers_needs_it_in_memory(make_recipe: MakeRecipe, text: Path) -> None:
    stream = {**FIRST, "losses": {"attention_output": 1}, "mode": "stream"}
    for source in ("self", [str(text), "self"]):
        data = {"source": source, "seq_len": 32}
        with pytest.raises(
            ValueError,
            match=r"stage first has mode: stream, which never .* write mode: layerwise there, or name",
        ):
            make_recipe(data=data, stages=[stream, {**FIRST, "name": "second"}])
        make_recipe(data=data, stages=[{**stream, "mode": "layerwise"}])


def test_held_out_text_is_read_before_layers_are_streamed(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = {**FIRST, "losses": {"attention_output": 1}, "mode": "stream"}
    monkeypatch.setattr(job, "stream_stage", lambda *_: pytest.fail("a layer was trained"))
    with pytest.raises(InvalidInput, match=r"evaluate.source .*none.txt is not a file"):
        distill(
            make_recipe(
                stages=[stream, {**FIRST, "name": "second"}],
                evaluate={"source": str(tmp_path / "none.txt"), "windows": 2},
            )
        )


class Launched(Exception):
    """This process would have become a launcher."""


def test_mistakes_are_told_by_the_process_that_would_launch(
    make_recipe: MakeRecipe, others: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its exit code; what a resumed run does not read again may be gone."""

    def execve(*_: object) -> None:
        raise Launched

    monkeypatch.setattr(launch.os, "execve", execve)
    copy = tmp_path / "copy.jsonl"
    recipe = make_recipe(losses={"hidden_mse": 1}, data={"source": str(copy), "seq_len": 32})
    words = (
        write_recipe(recipe, tmp_path / "recipe.yaml"), "--profile", "fsdp2", "--", "--num_processes", "2",
    )  # fmt: skip
    shared = ("--set", "teacher=shared", "--set", "stages.0.train=attention")
    assert refuses(f"data.source {copy} is neither a file", *words)
    shutil.copyfile(text, copy)
    assert isinstance(command(*words).exception, Launched)
    for partial in (False, True):
        if partial:
            (tmp_path / "out.partial").mkdir()
            copy.unlink()
        assert refuses(DEEPER, "--set", f"teacher={others / 'deeper'}", *words)
        assert refuses("teacher: shared needs whole models", *shared, *words)
    assert isinstance(command(*words).exception, Launched)


def test_of_two_processes_the_first_tells(make_recipe: MakeRecipe, others: Path, tmp_path: Path) -> None:
    file = write_recipe(
        make_recipe(losses={"hidden_mse": 1}, teacher=str(others / "deeper")), tmp_path / "recipe.yaml"
    )
    config = str(resources.files("kvfold.distill.parallel") / "profiles" / "ddp.yaml")
    launcher = [warm_python(), "-m", "accelerate.commands.launch", "--config_file", config]
    done = subprocess.run(
        [*launcher, "--num_processes=2", "--main_process_port=0", "-m", "kvfold.distill", str(file)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode
    assert done.stderr.count("Error: stage kl: the student has 2 layers") == 1


def test_another_process_tells_its_mistake_a_moment_later(
    make_recipe: MakeRecipe, others: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the only one that has met it."""
    file = write_recipe(
        make_recipe(losses={"hidden_mse": 1}, teacher=str(others / "deeper")), tmp_path / "recipe.yaml"
    )
    waited: list[float] = []
    monkeypatch.setattr(display.time, "sleep", waited.append)
    for rank, moments in (("0", 0), ("1", 1)):
        as_launched(monkeypatch, rank)
        assert refuses(DEEPER, file)
        assert len(waited) == moments


def test_a_held_out_text_of_too_long_a_name_leaves_nothing(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    name = "a" * 300
    file = write_recipe(make_recipe(evaluate={"source": name, "every": 1}), tmp_path / "recipe.yaml")
    before = set(tmp_path.iterdir())
    assert command(file, code=2).stderr.splitlines()[-1].endswith(": File name too long")
    assert set(tmp_path.iterdir()) == before
