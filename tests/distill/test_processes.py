"""Two processes compute what one computes."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import yaml

from kvfold.distill.job import distill

from .conftest import MakeRecipe
from .test_job import metrics, weights


def test_two_processes_equal_one(make_recipe: MakeRecipe, tmp_path: Path, teacher: Path) -> None:
    # float32 on disk, so that a missing all-reduce cannot hide in the rounding; a tied head, read inside the wrapped forward.
    # Two stages: wrapped twice, and frozen weights thawed in between.
    stage = {"losses": {"ce": 1.0}, "tokens": 576, "micro_batch": 2, "lr": 1e-2, "batch_tokens": 192}
    stages = [{**stage, "name": "first", "train": "attention"}, {**stage, "name": "second"}]
    same = {"student": str(teacher), "teacher": str(teacher), "stages": stages}
    alone = make_recipe(output=str(tmp_path / "alone"), **same)
    distill(alone)
    together = make_recipe(output=str(tmp_path / "together"), **same)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(together.resolved()), encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, "-m", "kvfold.distill", str(file)], env={**os.environ, "ACCELERATE_USE_CPU": "true"}, check=True)
    for mine, theirs in zip(metrics(tmp_path / "alone"), metrics(tmp_path / "together"), strict=True):
        torch.testing.assert_close(mine["ce"], theirs["ce"], rtol=1e-5, atol=0)
        torch.testing.assert_close(mine["grad_norm"], theirs["grad_norm"], rtol=1e-4, atol=0)
    # Where a gradient is almost nothing, Adam makes a step of its rounding error; so a tenth of the rate, not less.
    torch.testing.assert_close(weights(tmp_path / "alone"), weights(tmp_path / "together"), rtol=0, atol=1e-3)
