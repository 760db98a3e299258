"""Trackers get what metrics.jsonl gets, on this machine, and a resumed run reports nothing twice."""

from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.distill.recipe.watch_section import TrackerName
from kvfold.distill.run.job import distill
from kvfold.distill.stages import state
from kvfold.distill.watch import trackers

from ...support.distillation import metrics
from ..conftest import MakeRecipe


def scalars(directory: Path, tag: str) -> dict[int, float]:
    """Read the scalars that TensorBoard would draw."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install tensorboard"
    )
    events = accumulator.EventAccumulator(str(directory))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_the_table_has_every_tracker() -> None:
    assert tuple(trackers.TRACKERS) == get_args(TrackerName)


@pytest.mark.parametrize("is_killed", [False, True])
def test_tensorboard_is_told(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    recipe = make_recipe(trackers=["tensorboard"], save={"every": 4})
    if is_killed:
        save = state.save

        def die(directory: Path, progress: state.Progress, gathered: state.Gathered, keep: int) -> None:
            if progress.total_steps == 8:
                raise SystemExit("killed")
            save(directory, progress, gathered, keep)

        with monkeypatch.context() as patch:
            patch.setattr(state, "save", die)
            with pytest.raises(SystemExit, match="killed"):
                distill(recipe)
        assert list((tmp_path / "out.partial" / "trackers").rglob("events.*"))
    out = distill(recipe).output
    told = metrics(out)
    for key in ("kl", "lr", "grad_norm", "tokens_per_second"):
        assert scalars(out / "trackers" / "kvfold", key) == pytest.approx(
            {line["step"]: line[key] for line in told}
        )
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.skipif(find_spec("trackio") is None, reason="pip install trackio")
def test_trackio_is_told_and_stays_here(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    out = distill(make_recipe(trackers=["trackio"], tokens=384)).output
    assert [file.name for file in (out / "trackers" / "trackio").glob("*.db")] == ["kvfold.db"]
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(find_spec("wandb") is None, reason="pip install wandb")
def test_wandb_is_told_and_stays_here(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    out = distill(make_recipe(trackers=["wandb"], tokens=384)).output
    assert [file.suffix for file in (out / "trackers" / "wandb").glob("offline-run-*/*.wandb")] == [".wandb"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_what_is_not_installed_is_refused(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda wanted: None)
    with pytest.raises(
        InvalidInput, match=rf"trackers names {name}, which is not installed; run pip install {name}"
    ):
        distill(make_recipe(trackers=[name]))
    assert not (tmp_path / "out.partial").exists()
