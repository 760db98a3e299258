"""Trackers get what metrics.jsonl gets, on this machine, and a resumed run reports nothing twice."""

from pathlib import Path

import pytest

from kvfold.core.errors import InvalidInput
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


@pytest.mark.parametrize(
    ("name", "variable", "file"),
    [("trackio", "TRACKIO_DIR", "kvfold.db"), ("wandb", "WANDB_MODE", "offline-run-*/*.wandb")],
)
def test_other_trackers_are_told_and_stay_here(
    make_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    variable: str,
    file: str,
) -> None:
    pytest.importorskip(name, reason=f"pip install {name}")
    monkeypatch.delenv(variable, raising=False)
    out = distill(make_recipe(trackers=[name], tokens=384)).output
    assert len(list((out / "trackers" / name).glob(file))) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_what_is_not_installed_is_refused(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda wanted: None)
    with pytest.raises(InvalidInput, match=rf"trackers names {name}, which is not installed; run .* {name}"):
        distill(make_recipe(trackers=[name]))
    assert not (tmp_path / "out.partial").exists()
