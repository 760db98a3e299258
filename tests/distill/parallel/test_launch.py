"""Profiles: what is launched, what is refused, what is told."""

import sys
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from kvfold.distill import cli
from kvfold.distill.parallel import launch
from kvfold.distill.parallel.accelerator import check_launcher
from kvfold.distill.recipe.recipe import Profile

from ...support.distillation import as_launched, command, refuses, write_recipe
from ..conftest import MakeRecipe

LAUNCHED = ("ddp", "fsdp2", "zero2", "zero3", "multinode")


class Replaced(Exception):
    """This process would have become another."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the command and environment instead of executing it."""
    seen: list[Any] = []

    def execve(file: str, words: list[str], environment: dict[str, str]) -> None:
        seen[:] = [words, environment]
        raise Replaced

    monkeypatch.setattr(launch.os, "execve", execve)
    return seen


@pytest.fixture
def file(make_recipe: MakeRecipe, tmp_path: Path) -> Path:
    return write_recipe(make_recipe(tokens=192), tmp_path / "recipe.yaml")


@pytest.mark.parametrize("profile", get_args(Profile))
def test_profiles_are_configurations_of_accelerate(profile: str) -> None:
    """Unknown keys are an error there; precision is the recipe's."""
    path = resources.files("kvfold.distill.parallel") / "profiles" / f"{profile}.yaml"
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "no"
    assert (config.distributed_type != "NO") == (profile in LAUNCHED)
    assert all(config.fsdp_config["fsdp_version"] == 2 for _ in range(config.distributed_type == "FSDP"))


def test_a_profile_becomes_the_launcher_of_the_same_command(file: Path, executed: list[Any]) -> None:
    result = command(
        file, "--profile", "fsdp2", "--set", "log_every=3", "--json", "--", "--num_processes", "2", "--debug"
    )
    assert isinstance(result.exception, Replaced)
    launched, environment = executed
    config = resources.files("kvfold.distill.parallel") / "profiles" / "fsdp2.yaml"
    ours = ["-m", "kvfold.distill", str(file), "--set", "log_every=3", "--json"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    assert launched == [*launcher, "--num_processes", "2", "--debug", *ours]
    assert environment["ACCELERATE_USE_CPU"] == "true"  # the recipe's device


def test_the_recipe_can_name_the_profile(file: Path, executed: list[Any]) -> None:
    assert isinstance(command(file, "--set", "profile=ddp", "--", "--num_processes=2").exception, Replaced)
    assert str(resources.files("kvfold.distill.parallel") / "profiles" / "ddp.yaml") in executed[0]


def test_what_is_launched_already_is_not_launched_again(
    file: Path, executed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_launched(monkeypatch)
    monkeypatch.setattr(cli, "_run", lambda recipe, as_json: None)
    assert command(file, "--profile", "ddp").exit_code == 0
    assert executed == []


@pytest.mark.parametrize("profile", ["cpu", "single"])
def test_one_process_needs_no_launcher(file: Path, executed: list[Any], profile: str) -> None:
    assert command(file, "--profile", profile, "--json").exit_code == 0
    assert executed == []


@pytest.mark.parametrize(("arguments", "message"), [
    (["--profile", "single", "--", "--debug"], "single starts no launcher, so --debug has no effect"),
    (["--profile", "ddp"],
     "ddp does not define the number of processes without a GPU; add -- --num_processes N"),
    (["--profile", "multinode"], "multinode needs --machine_rank and --main_process_ip on each machine"),
    (["--profile", "multinode", "--", "--machine_rank=0", "--main_process_ip=a"],
     "the number of processes on all machines"),
    (["--profile", "ddp", "--", "--num-processes=two"],
     "--num_processes is 'two'; it should be a number of at least 1"),
    (["--profile", "ddp", "--", "--num_processes"], "--num_processes is ''; it should"),
    (["--profile", "ddp", "other.yaml"], "unexpected argument other.yaml"),
    (["--", "--debug"], "unexpected argument --debug; put accelerate arguments after `--`"),
    (["--profile", "dpp"], "'dpp' is not one of 'cpu', 'single', 'ddp'"),
    (["--set", "profile=dpp"], "profile is 'dpp'; it should be 'cpu', 'single', 'ddp'"),
])  # fmt: skip
def test_mistakes_are_told_first(file: Path, executed: list[Any], arguments: list[str], message: str) -> None:
    assert message in command(file, *arguments, code=2).stderr
    assert executed == []


def test_what_was_asked_is_run(file: Path, executed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's arguments may undo a profile: its processes know what they should be part of."""
    command(file, "--profile", "fsdp2", "--", "--num_processes", "4", "--num-processes=2")
    asked = {name: value for name, value in executed[1].items() if name.startswith("KVFOLD_")}
    assert asked == {"KVFOLD_PROFILE": "fsdp2", "KVFOLD_PROCESSES": "2"}
    executed.clear()
    monkeypatch.setattr(cli, "_run", lambda recipe, as_json: None)
    assert command(file).exit_code == 0
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert refuses("started 1 processes, but --num_processes asks for 2", file)
    as_launched(monkeypatch)
    assert refuses("the profile fsdp2 divides models among the processes, but", file)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert command(file).exit_code == 0
    assert executed == []


def test_untested_profiles_say_so(file: Path, executed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "TESTED", {**launch.TESTED, "zero3": frozenset({"cuda"})})
    result = command(file, "--profile", "zero3", "--", "--num_processes", "2")
    assert "the profile zero3 is untested without a GPU; it has run on GPUs" in result.stderr
    assert "untested" not in command(file, "--profile", "zero2", "--", "--num_processes", "2").stderr


def test_one_process_on_a_gpu_is_not_called_untested(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has run (docs/results/gpu.md)."""
    monkeypatch.setattr(launch, "uses_gpu", lambda *_: True)
    result = command(file, "--profile", "single")
    assert (result.exit_code, "untested" in result.stderr) == (0, False)


def test_several_gpus_are_new(file: Path, executed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "uses_gpu", lambda *_: True)
    told = [command(file, "--profile", "fsdp2", "--", "--num_processes", count).stderr for count in "12"]
    assert ["has run on one GPU, but not yet on several" in words for words in told] == [False, True]
    assert "untested" not in "".join(told)
    assert len(executed) == 2


@pytest.mark.parametrize(("variables", "message"), [
    ({"ACCELERATE_USE_FSDP": "true"}, "the launcher asks for FSDP 1"),
    (
        {"ACCELERATE_USE_DEEPSPEED": "true"},
        "the launcher asks for DeepSpeed, which kvfold does not use; run kvfold distill RECIPE "
        "with --profile zero2",
    ),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "the launcher asks for Megatron-LM"),
])  # fmt: skip
def test_launchers_that_ask_for_something_else_are_refused(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(launch.InvalidInput, match=message):
        check_launcher()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"):
        monkeypatch.delenv(name, raising=False)
    check_launcher()
