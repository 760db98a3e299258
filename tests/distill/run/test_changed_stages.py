"""A run resumes with other stages after those that it has begun, to the bits of a run that had them from
the start.
"""

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.distill.run import job, loop
from kvfold.distill.run.job import distill
from kvfold.distill.run.resume import _check_changes
from kvfold.distill.stages.state import Progress
from kvfold.distill.stages.stream import stream_stage

from ...support.distillation import STAGES, interrupt, metrics, same_bits
from ..conftest import MakeRecipe

FIRST, SECOND = STAGES  # of five steps each
SAME = ("step", "stage", "grad_norm")
OTHER = {
    **SECOND,
    "name": "other",
    "lr": 5e-3,
    "losses": {"ce": 1, "hidden_mse": 0.5},
    "train": "attention+norms",
}


@pytest.fixture
def little(tmp_path: Path) -> dict[str, Any]:
    """Data that a run reads more than once."""
    file, draw = tmp_path / "little.txt", random.Random(1)
    file.write_text(
        " ".join(draw.choices(["key", "value", "cache", "head", "fold"], k=200)), encoding="utf-8"
    )
    return {"source": str(file), "seq_len": 32}


def check_goes_on(make_recipe: MakeRecipe, tmp_path: Path, stages: list[dict[str, Any]], **keys: Any) -> None:
    """A run stopped before ends as one that has these stages from its start."""
    distill(make_recipe(stages=stages, **keys))
    distill(make_recipe(stages=stages, output=str(tmp_path / "whole"), **keys))
    assert same_bits(tmp_path / "out", tmp_path / "whole")
    lines = [metrics(tmp_path / name) for name in ("out", "whole")]
    for mine, theirs in zip(*lines, strict=True):
        assert [mine.get(key) for key in SAME] == [theirs.get(key) for key in SAME]


@pytest.mark.parametrize("step", [3, 5])
def test_a_stage_that_has_not_begun_may_change(
    make_recipe: MakeRecipe, tmp_path: Path, step: int, held: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {
        "evaluate": {"source": str(held), "every": 2, "windows": 4, "keep": "best"},
        "save": {"keep_stages": True},
    }
    interrupt(make_recipe(stages=STAGES, **keys), step)
    check_goes_on(make_recipe, tmp_path, [FIRST, OTHER], **keys)
    assert "recipe that differs in stages not yet begun: stages[1].losses.ce (was None)" in caplog.text


def test_tokens_may_move_between_stages_that_have_not_begun(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    interrupt(make_recipe(stages=STAGES), 3)
    parts = [{**SECOND, "name": name, "tokens": tokens} for name, tokens in (("two", 384), ("three", 576))]
    check_goes_on(make_recipe, tmp_path, [FIRST, *parts])


def test_a_stage_that_has_begun_may_not_change(make_recipe: MakeRecipe) -> None:
    interrupt(make_recipe(stages=STAGES), 7)
    with pytest.raises(
        InvalidInput, match=r"the recipe differs .* in stages\[1\].lr \(was 0.001\); change it back to resume"
    ):
        distill(make_recipe(stages=[FIRST, {**SECOND, "lr": 1e-4}]))
    with pytest.raises(
        InvalidInput, match=r"the recipe differs .* in stages\[1\].batch_tokens \(was 192\), "
    ):
        distill(make_recipe(stages=[FIRST]))


def test_a_stage_of_another_version_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(stages=STAGES)
    saved = recipe.resolved()
    saved["stages"][1]["gone"] = 1
    with pytest.raises(InvalidInput, match=r"the recipe differs .* in stages\[1\].gone"):
        _check_changes(Progress(recipe=saved), recipe, tmp_path)


def test_streamed_stages_may_not_change_and_those_behind_them_may(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No state tells which recipe's layers are on the disk."""
    streamed = [
        {**FIRST, "name": name, "mode": "stream", "losses": {"attention_output": 1}}
        for name in ("one", "two")
    ]

    def stream(given: Any, *others: Any) -> Any:
        if given.stage.name == "two":
            raise loop.Interrupted(signal.SIGTERM, "stopped")
        return stream_stage(given, *others)

    with monkeypatch.context() as patch:
        patch.setattr(job, "stream_stage", stream)
        with pytest.raises(loop.Interrupted):
            distill(make_recipe(stages=[*streamed, SECOND]))
    for other in (
        {**streamed[1], "lr": 1e-4},
        {**streamed[1], "name": "three"},
        {**streamed[1], "mode": "layerwise"},
    ):
        with pytest.raises(InvalidInput, match=r"the recipe differs .* in stages\[1\]\.(lr|name|mode) "):
            distill(make_recipe(stages=[streamed[0], other, SECOND]))
    check_goes_on(make_recipe, tmp_path, [*streamed, OTHER])


def test_a_stage_that_left_a_checkpoint_may_not_change(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Its state may have been lost since."""
    interrupt(make_recipe(stages=STAGES), 3)
    (tmp_path / "out.partial" / "stages" / "second").mkdir(parents=True)
    with pytest.raises(InvalidInput, match=r"the recipe differs .* in stages\[1\].lr"):
        distill(make_recipe(stages=[FIRST, {**SECOND, "lr": 1e-4}]))


@pytest.mark.parametrize("tokens", [768, 1920])
def test_other_tokens_are_refused_where_they_change_the_order_of_the_text(
    make_recipe: MakeRecipe, tokens: int
) -> None:
    """The number of windows of a source decides their permutation, of which the first stage has read a part."""
    interrupt(make_recipe(stages=STAGES), 3)
    with pytest.raises(
        InvalidInput, match=rf"reads {30 + tokens // 32} windows of text, but .* was started with 60, which"
    ):
        distill(make_recipe(stages=[FIRST, {**SECOND, "tokens": tokens}]))


@pytest.mark.parametrize("stages", [[FIRST, {**SECOND, "tokens": 1536}], [FIRST], [FIRST, SECOND, OTHER]])
def test_other_tokens_are_fine_where_all_the_text_is_read_anyway(
    make_recipe: MakeRecipe, tmp_path: Path, little: dict[str, Any], stages: list[dict[str, Any]]
) -> None:
    interrupt(make_recipe(stages=STAGES, data=little), 3)
    if len(stages) == 1:  # 960 tokens are less than there are
        with pytest.raises(InvalidInput, match="reads 30 windows of text"):
            distill(make_recipe(stages=stages, data=little))
    else:
        check_goes_on(make_recipe, tmp_path, stages, data=little)
