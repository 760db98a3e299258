"""The benchmark of recovery: what is counted, what is trained on what, and that a stopped grid resumes."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine, recovery
from benchmarks.reached import PLAIN, summarise, tokens_to, wanted
from benchmarks.recovery import RATES
from benchmarks.recovery_runs import BEST, RECIPES, SOURCE, TUNED, Grid, Run, Setting, make_recipe, split
from kvfold.core.errors import InvalidInput

SETTING = Setting(
    model="demo", text="stdlib", data="stdlib", tokens=32768, tuning_tokens=16384, batch_tokens=2048,
    window=256,
    evaluations=8, windows=16,
)  # fmt: skip


def curve(*perplexities: float) -> list[dict[str, float]]:
    return [
        {"tokens": 100.0 * number, "perplexity": value, "kl": 0.0}
        for number, value in enumerate(perplexities)
    ]


def row(start: str, recipe: str, seed: int, *perplexities: float, target: str = "mla 25%") -> dict[str, Any]:
    own = {"target": target, "start": start, "recipe": recipe, "seed": seed, "rates": {"ce": 1e-3}}
    return {**own, "source": 10.0, "text_sha256": "", "points": curve(*perplexities)}


def test_targets_are_shares_of_the_plain_starts_loss() -> None:
    assert wanted(40, 10, 0) == pytest.approx(40)
    assert wanted(40, 10, 0.5) == pytest.approx(20)
    assert wanted(40, 10, 1) == pytest.approx(10)


def test_tokens_are_read_off_the_curve() -> None:
    points = curve(40, 20, 15)
    assert tokens_to(points, 40) == 0
    assert tokens_to(points, 20) == pytest.approx(100)
    assert tokens_to(points, math.sqrt(40 * 20)) == pytest.approx(50)
    assert tokens_to(points, 14.9) is None


def test_every_start_is_measured_by_the_plain_ones_loss() -> None:
    rows = [
        row(PLAIN, "ce", 0, 1000, 100, 10.1),
        row(PLAIN, "ce", 1, 1000, 100, 50),
        row(PLAIN, "ce", 2, 1000, 10, 10),
        row(BEST, "kl", 0, 11, 10.2),
        row(SOURCE, "ce", 0, 10, 9, target=SOURCE),
    ]
    plain, best, control = summarise(rows)
    assert plain["seeds"] == [0, 1, 2]
    assert plain["recovered_at_start"] == 0
    assert plain["recovered"]["most"] == pytest.approx(1)
    assert plain["recovered"]["least"] == pytest.approx(1 - math.log(5) / math.log(100))
    # The seed that does not arrive counts as the slowest.
    assert plain["reached"]["90%"]["tokens"][1] is None
    assert plain["reached"]["90%"]["seeds"] == 2
    assert (
        plain["reached"]["90%"]["median"]
        == plain["reached"]["90%"]["tokens"][0]
        > plain["reached"]["90%"]["tokens"][2]
    )
    assert best["reached"]["95%"]["median"] == 0
    assert 0 < best["reached"]["99%"]["median"] < 100
    assert best["as_usual"] == {"seeds": 0, "median": None, "tokens": [None]}
    assert plain["as_usual"]["tokens"] == [200, 200, 100]
    assert control["perplexity"]["median"] == 9
    assert "reached" not in control


def test_where_most_seeds_never_arrive_there_is_no_median() -> None:
    (line,) = summarise(
        [row(PLAIN, "ce", 0, 1000, 10), row(PLAIN, "ce", 1, 1000, 50), row(PLAIN, "ce", 2, 1000, 50)]
    )
    assert line["reached"]["90%"] == {"seeds": 1, "median": None, "tokens": [90, None, None]}


@pytest.mark.parametrize("name", RECIPES)
def test_all_recipes_read_the_same_number_of_tokens(name: str, tmp_path: Path) -> None:
    rates = dict.fromkeys(RECIPES[name], 1e-3)
    run = Run(target="mla 25%", start=BEST, recipe=name, seed=3, rates=rates)
    recipe = make_recipe(Grid(SETTING, tmp_path, tmp_path), run)
    assert sum(stage.tokens for stage in recipe.stages) == SETTING.tokens
    assert recipe.data.seed == 3
    assert recipe.evaluate is not None
    assert recipe.evaluate.every == 2


def test_rates_are_chosen_on_neither_training_nor_evaluation_text(tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(101)]
    (tmp_path / "all.txt").write_text("".join(lines))
    grid = Grid(replace(SETTING, text=str(tmp_path / "all.txt")), tmp_path, tmp_path)
    split(grid.setting, tmp_path)
    evaluated, tuned = (
        (tmp_path / f"{name}.txt").read_text().splitlines(keepends=True) for name in ("evaluated", "tuned")
    )
    assert evaluated + tuned == lines
    assert abs(len(evaluated) - len(tuned)) < 10
    run = Run(target="mla 25%", start=PLAIN, recipe=f"{TUNED} kl", seed=0, rates={"kl": 1e-3})
    for one, name in ((run, "tuned"), (replace(run, recipe="kl"), "evaluated")):
        recipe = make_recipe(grid, one)
        assert recipe.evaluate is not None
        assert recipe.evaluate.source == str(tmp_path / f"{name}.txt")
        assert recipe.data.source == SETTING.data


def test_every_loss_has_as_many_tries_and_the_best_rate_is_kept() -> None:
    runs = list(recovery.tuning_runs())
    tries = {
        (run.recipe, run.start): [one for one in runs if (one.recipe, one.start) == (run.recipe, run.start)]
        for run in runs
    }
    assert {len(own) for own in tries.values()} == {5}
    ends = ((3e-5, 35), (1e-4, 30), (3e-4, 20), (1e-3, 25), (3e-3, 40))
    rows = [
        {**row(start, f"{TUNED} {loss}", 0, 50, end), "rates": {loss: rate}}
        for loss in RATES
        for start in (PLAIN, BEST)
        for rate, end in ends
    ]
    assert recovery.chosen_rates(rows, PLAIN) == {loss: {loss: 3e-4} for loss in RATES}
    assert recovery.chosen_rates(rows, SOURCE) == {}
    after = list(recovery.tuning_after(recovery.rates_of(rows)))
    assert {run.rates["attention_output"] for run in after} == {3e-4}
    assert [run.rates["kl"] for run in after if run.start == BEST] == list(RATES["kl"])


def test_a_stopped_grid_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows are kept as they come, and no run is done twice; another setting is another grid."""
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    monkeypatch.setattr(recovery, "RESULTS", tmp_path)
    done: list[str] = []

    def train(grid: Grid, run: Run) -> dict[str, Any]:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(run.label)
        return {**row(run.start, run.recipe, run.seed, 20, 15, target=run.target), "rates": run.rates}

    monkeypatch.setattr(recovery, "train", train)
    grid = Grid(SETTING, tmp_path, tmp_path)
    rates = {
        start: {name: dict.fromkeys(parts, 1e-3) for name, parts in RECIPES.items()}
        for start in (PLAIN, BEST, SOURCE)
    }
    runs = list(recovery.grid_runs(["mla 25%"], [0], rates))
    assert [run.recipe for run in runs] == ["ce", "ce", "ce", "kl", "kl", "align+kl", "align+kl"]
    with pytest.raises(KeyboardInterrupt):
        recovery.run_all(grid, iter(runs), "grid", [])
    rows = recovery.read_rows("grid", SETTING)
    assert len(rows) == 5
    done.clear()
    recovery.run_all(grid, iter(runs), "grid", rows)
    assert done == [run.label for run in runs[5:]]
    assert len(recovery.read_rows("grid", SETTING)) == 7
    with pytest.raises(InvalidInput, match="tokens 32768, not 99"):
        recovery.read_rows("grid", replace(SETTING, tokens=99))
