"""A student with a real latent norm: it is trained as it is, and a stopped run ends in the same bits."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import nn

from kvfold.convert.formats.linear_norm import LinearNorm
from kvfold.convert.formats.stock import NORM_WEIGHT
from kvfold.distill.run import job
from kvfold.distill.run.job import distill

from ...support.distillation import interrupt, same_bits
from ...support.folds import convert
from ..conftest import MakeRecipe


@pytest.fixture
def fitted(teacher: Path, text: Path, tmp_path: Path) -> Path:
    out = tmp_path / "fitted"
    options = (
        "--to", "mla", "--kv-budget", "50%", "--container", "stock", "--latent-norm", "fitted",
        "--calibration", str(text), "--sequences", "6", "--length", "48", "--refine", "0",
    )  # fmt: skip
    convert(teacher, *options, out=out, code=0)
    return out


def test_it_is_trained_as_it_is_and_resumes_to_the_same_bits(
    make_recipe: MakeRecipe, fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[nn.Module] = []
    train_stage = job.train_stage

    def watched(context: Any, *arguments: Any) -> Any:
        trained.append(context.student)
        return train_stage(context, *arguments)

    monkeypatch.setattr(job, "train_stage", watched)
    whole = distill(make_recipe(student=str(fitted), output=str(tmp_path / "whole"), lr=1e-3))
    assert trained
    assert not any(isinstance(module, LinearNorm) for module in trained[0].modules())
    (stage,) = whole.stages
    assert stage["last"]["kl"] < 0.8 * stage["first"]["kl"]
    before, after = (load_file(directory / "model.safetensors") for directory in (fitted, whole.output))
    norms = [name for name in before if name.endswith("kv_a_layernorm.weight")]
    assert norms
    for name in norms:
        assert float(before[name].max()) < NORM_WEIGHT / 8
        assert not after[name].equal(before[name])

    recipe = make_recipe(student=str(fitted), lr=1e-3)
    interrupt(recipe, 3)
    resumed = distill(recipe)
    assert same_bits(resumed.output, whole.output)
