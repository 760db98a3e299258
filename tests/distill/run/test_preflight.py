"""A run that cannot train is refused before it begins.

By the run before its first stage, by `validate` and by `explain`.
"""

import os
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from kvfold.core.errors import InvalidInput
from kvfold.distill import display
from kvfold.distill.cli import main
from kvfold.distill.parallel import launch
from kvfold.distill.recipe.recipe import Recipe, Stage
from kvfold.distill.run import job
from kvfold.distill.run.job import distill
from kvfold.distill.run.preflight import check_stages
from kvfold.distill.stages.weights import find_trained

from ...support.tokenizers import save_tokenizer
from ...support.warm_python import warm_python
from ..conftest import MakeRecipe

FIRST: dict[str, Any] = {
    "name": "first",
    "tokens": 192,
    "lr": 1e-3,
    "batch_tokens": 192,
    "train": "attention",
}
DEEPER = "the student has 2 layers and the teacher 3"
# The second stage, keys of the recipe, what is told.
MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"losses": {"hidden_mse": 1}},
        {"teacher": "deeper"},
        f"stage second: {DEEPER}; losses that compare layers need the same number",
    ),
    (
        {"losses": {"attention_output": 1}},
        {"teacher": "deeper"},
        f"stage second: {DEEPER}, so layers cannot be aligned",
    ),
    (
        {"losses": {"hidden_cosine": 1}},
        {"teacher": "wider"},
        "stage second: hidden_cosine compares vectors of one size",
    ),
    (
        {"train": "lora", "lora": {"targets": ["nope"]}},
        {},
        "stage second: lora.targets names nope, which is not a linear layer",
    ),
    (
        {"train": "lora", "lora": {"targets": ["lm_head", "q_proj"]}},
        {},
        "names lm_head, the output embedding, which cannot have an adapter",
    ),
    (
        {"losses": {"attention_output": 1}, "train": "lora", "lora": {"targets": ["up_proj"]}},
        {},
        "stage second: mode: layerwise trains only attention, but lora.targets names other layers",
    ),
]


def write(recipe: Recipe, directory: Path) -> Path:
    file = directory / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.resolved()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def others(teacher: Path) -> Path:
    """Teachers that have one layer more, or wider ones."""
    for name, change in (("deeper", {"num_hidden_layers": 3}), ("wider", {"hidden_size": 64})):
        directory = teacher.parent / "others" / name
        LlamaForCausalLM(LlamaConfig.from_pretrained(teacher, **change)).save_pretrained(directory)
        save_tokenizer(directory)
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
    file = write(recipe, tmp_path)
    for command in ("validate", "explain"):
        result = CliRunner().invoke(main, [command, str(file)])
        assert (result.exit_code, message in result.stderr) == (2, True)


@pytest.mark.parametrize("loss", ["kl", "attention_relation"])
def test_what_needs_no_same_width_is_not_refused(
    make_recipe: MakeRecipe, student: Path, others: Path, loss: str
) -> None:
    recipe = make_recipe(losses={loss: 1}, teacher=str(others / "wider"))
    check_stages(recipe, student, others / "wider", sharded=True)
    distill(make_recipe(losses={loss: 1}, teacher=str(others / "wider"), tokens=192))


def test_a_shared_teacher_is_refused_where_models_are_sharded(
    make_recipe: MakeRecipe, student: Path, teacher: Path
) -> None:
    align = {**FIRST, "losses": {"attention_output": 1}}
    recipe = make_recipe(teacher="shared", stages=[align, {**FIRST, "name": "second"}])
    check_stages(recipe, student, teacher, sharded=False)
    with pytest.raises(
        InvalidInput, match="stage second: teacher: shared needs whole models in every process; write"
    ):
        check_stages(recipe, student, teacher, sharded=True)
    check_stages(make_recipe(teacher="shared", stages=[align]), student, teacher, sharded=True)


@pytest.mark.parametrize(("profile", "code"), [("ddp", 0), ("fsdp2", 2), ("zero2", 2), ("zero3", 2)])
def test_validate_knows_the_profile(make_recipe: MakeRecipe, tmp_path: Path, profile: str, code: int) -> None:
    file = write(make_recipe(teacher="shared", train="attention"), tmp_path)
    result = CliRunner().invoke(main, ["validate", str(file), "--set", f"profile={profile}"])
    assert (result.exit_code, "shared needs whole models in every process" in result.stderr) == (
        code,
        code == 2,
    )


def test_a_launcher_that_shards_is_asked_itself(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    align = {**FIRST, "losses": {"attention_output": 1}}
    with pytest.raises(InvalidInput, match="stage second: teacher: shared needs whole models"):
        distill(make_recipe(teacher="shared", stages=[align, {**FIRST, "name": "second"}]))


def test_the_output_embedding_gets_no_adapter_whatever_its_name() -> None:
    """Losses read its weight: an adapter next to it would never be trained."""
    pytest.importorskip("peft")
    config = GPTNeoXConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
    )
    model = GPTNeoXForCausalLM(config)
    (head,) = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]

    def stage(*targets: str) -> Stage:
        return Stage.model_validate(
            {"name": "a", "tokens": 1, "lr": 1, "train": "lora", "lora": {"targets": targets}}
        )

    with pytest.raises(
        InvalidInput, match=rf"lora.targets names {head}, the output embedding, which cannot have an adapter"
    ):
        find_trained(model, stage("query_key_value", head))
    with pytest.raises(
        InvalidInput, match="names nope, which is not a linear layer of the student; known: dense"
    ) as refused:
        find_trained(model, stage("nope"))
    assert head not in str(refused.value)
    assert [name.rpartition(".")[2] for name in find_trained(model, stage("query_key_value"))] == [
        "query_key_value"
    ]


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
    file = write(make_recipe(losses={"hidden_mse": 1}, data={"source": str(copy), "seq_len": 32}), tmp_path)
    command = [str(file), "--profile", "fsdp2", "--", "--num_processes", "2"]

    def run(*settings: str) -> Any:
        return CliRunner().invoke(
            main, [*(word for setting in settings for word in ("--set", setting)), *command]
        )

    result = run()
    assert (result.exit_code, f"data.source {copy} is neither a file" in result.stderr) == (2, True)
    shutil.copyfile(text, copy)
    assert isinstance(run().exception, Launched)
    for partial in (False, True):
        if partial:
            (tmp_path / "out.partial").mkdir()
            copy.unlink()
        result = run(f"teacher={others / 'deeper'}")
        assert (result.exit_code, DEEPER in result.stderr) == (2, True)
        result = run("teacher=shared", "stages.0.train=attention")
        assert (result.exit_code, "teacher: shared needs whole models" in result.stderr) == (2, True)
    assert isinstance(run().exception, Launched)


def test_of_two_processes_the_first_tells_what_both_have_met(
    make_recipe: MakeRecipe, others: Path, tmp_path: Path
) -> None:
    file = write(make_recipe(losses={"hidden_mse": 1}, teacher=str(others / "deeper")), tmp_path)
    config = str(resources.files("kvfold.distill.parallel") / "profiles" / "ddp.yaml")
    launcher = [
        warm_python(),
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        config,
        "--num_processes",
        "2",
    ]
    done = subprocess.run(
        [*launcher, "--main_process_port", "0", "-m", "kvfold.distill", str(file)],
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
    file = write(make_recipe(losses={"hidden_mse": 1}, teacher=str(others / "deeper")), tmp_path)
    waited: list[float] = []
    monkeypatch.setattr(display.time, "sleep", waited.append)
    for rank, moments in (("0", 0), ("1", 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        result = CliRunner().invoke(main, [str(file)])
        assert (result.exit_code, DEEPER in result.stderr) == (2, True)
        assert len(waited) == moments
