"""A distillation of all kinds of stages, stopped before every kind of operation on its files: the same bits."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.run.job import distill

from ...support.distillation import metrics, write_recipe
from ...support.stops import run_to_the_end
from ...support.warm_server import WarmServer
from ..conftest import MakeRecipe

_SPEED = ("tokens_per_second", "peak_memory_gib")
STAGE = {"tokens": 384, "batch_tokens": 192, "lr": 1e-2}
ALIGN = {**STAGE, "losses": {"attention_output": 1.0}, "train": "attention"}
_SERVER = WarmServer(
    [
        __name__, "transformers.models.llama.modeling_llama", "datasets", "matplotlib.pyplot",
        "kvfold.distill.cli",
    ]
)  # fmt: skip


def kind_of(operation: str) -> str:
    """Return an operation without numbers and stages' names."""
    event, _, place = operation.partition(" ")
    # Every step of every stage is once the last that is saved.
    if event != "os.rename" or "out.partial/state/step" not in place:
        place = re.sub(r"-[0-9a-f]{5,}|(?<=stages/)\w+", "", re.sub(r"\.kvfold-\w+", ".kvfold", place))
    return f"{event} {place if event == 'os.rename' or place.count('/') < 2 else os.path.dirname(place)}"


@pytest.fixture
def recipe(make_recipe: MakeRecipe, held: Path, tmp_path: Path) -> Recipe:
    """All kinds of stages, a teacher's cache, evaluations that choose weights, and every step saved."""
    stages = [
        {**ALIGN, "name": "stream", "mode": "stream"},
        {**ALIGN, "name": "align"},
        {**STAGE, "name": "kl", "lr": 1e-3},
    ]
    return make_recipe(
        stages=stages,
        output=str(tmp_path / "whole" / "out"),
        teacher_cache=str(tmp_path / "whole" / "cache"),
        evaluate={"source": str(held), "every": 1, "windows": 4, "keep": "best"},
        save={"every": 1, "keep": 1, "keep_stages": True},
    )


def result(out: Path) -> dict[str, Any]:
    """All that a run leaves, but its speed and where it was."""
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")}
    lines = [{key: value for key, value in line.items() if key not in _SPEED} for line in metrics(out)]
    told = json.loads((out / "kvfold.json").read_text())["distill"]
    return {
        **files, "metrics": lines, "curve": json.loads((out / "curve.json").read_text()),
        "told": told["evaluation"],
    }  # fmt: skip


@pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="there is no /proc, which tells where a directory is"
)
def test_a_run_goes_on_wherever_it_was_stopped(recipe: Recipe, tmp_path: Path) -> None:
    distill(recipe)
    work = tmp_path / "work"
    work.mkdir()
    killed = recipe.model_copy(update={"output": str(work / "out"), "teacher_cache": str(work / "cache")})
    file = write_recipe(killed, tmp_path / "recipe.yaml")
    kinds = run_to_the_end(_SERVER, ["distill", str(file)], work, tmp_path / "told", kind_of)
    assert result(work / "out") == result(tmp_path / "whole" / "out")
    assert {path.name for path in work.iterdir()} == {"out", "cache"}
    for kind in (
        "open out.partial/tokens.bin.partial",
        "os.rename out.partial/stages/.stream/layer.safetensors.partial",  # in a layer of a streamed stage
        "os.rename out.partial/state/step-00000006.partial",
        "open out.partial/evaluations.jsonl",
        "open cache/manifest.json.partial",
        "os.rename cache/head.safetensors.partial",
        "os.rename cache/hidden.safetensors.partial",
        "open out.partial/best/step.partial",
        "os.rename out.partial/final",
        "open journal.jsonl.partial",
        "os.rename out.partial/journal.jsonl.partial",
        "open journal.jsonl",
        "os.remove out.partial/journal.jsonl",
        "os.remove out.partial/lock",
    ):
        assert kind in kinds, kinds
