"""Two processes compute what one computes, whether each has the whole student or a shard of it."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from kvfold.distill.run.job import distill

from ...support.distillation import KILLED, launch, metrics, weights, write_recipe
from ...support.warm_python import warm_python
from ..conftest import MakeRecipe

STAGE = {"losses": {"kl": 0.5, "ce": 0.5}, "tokens": 576, "micro_batch": 2, "lr": 1e-4, "batch_tokens": 192}
# Wrapped twice, and frozen weights thawed in between.
STAGES = [{**STAGE, "name": "first", "train": "attention"}, {**STAGE, "name": "second"}]


def check_equal(one: Path, other: Path, student: str) -> None:
    """The same losses and gradients step by step, and the same weights, which are not the first ones."""
    for mine, theirs in zip(metrics(one), metrics(other), strict=True):
        assert mine["ce"] == pytest.approx(theirs["ce"], rel=1e-5)
        assert mine["kl"] == pytest.approx(theirs["kl"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    before, after = weights(student), weights(other)
    torch.testing.assert_close(weights(one), after, rtol=0, atol=1e-6)
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-4


@pytest.fixture
def alone(make_recipe: MakeRecipe, tmp_path: Path, float32_models: dict[str, str]) -> Path:
    """Run the stages in one process."""
    distill(make_recipe(output=str(tmp_path / "alone"), stages=STAGES, **float32_models))
    return tmp_path / "alone"


def test_copies_in_two_processes_equal_one(
    make_recipe: MakeRecipe, tmp_path: Path, float32_models: dict[str, str], alone: Path
) -> None:
    assert launch(make_recipe(output=str(tmp_path / "together"), stages=STAGES, **float32_models), "ddp") == 0
    check_equal(alone, tmp_path / "together", float32_models["student"])


@pytest.mark.parametrize(("before", "profile"), [(2, None), (1, "zero2")])
def test_a_killed_run_goes_on_with_another_number_of_processes(
    before: int,
    profile: str | None,
    make_recipe: MakeRecipe,
    tmp_path: Path,
    float32_models: dict[str, str],
    alone: Path,
) -> None:
    """In the middle of the second stage, from shards to the whole, and from the whole to shards."""
    recipe = make_recipe(
        output=str(tmp_path / "together"), stages=STAGES, save={"every": 1}, **float32_models
    )
    (tmp_path / "killed.py").write_text(KILLED, encoding="utf-8")
    file = write_recipe(recipe, tmp_path / "recipe.yaml")
    fsdp = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    sharded = fsdp if before == 2 else {}
    torchrun = [warm_python(), "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={before}"]
    killed = [*torchrun, str(tmp_path / "killed.py"), str(file), "5"]
    assert subprocess.run(killed, env={**os.environ, **sharded}, check=False, capture_output=True).returncode
    states = sorted(path.name for path in (tmp_path / "together.partial" / "state").iterdir())
    assert states == ["step-00000003", "step-00000004"]
    if profile is None:
        distill(recipe)
    else:
        assert launch(recipe, profile) == 0
    check_equal(alone, tmp_path / "together", float32_models["student"])
