"""The benchmark of training steps.

All kinds train, on the same tokens, and what is compared belongs together.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.folds import DEMO
from benchmarks.training import (  # fmt: skip
    CACHE,
    KINDS,
    STEPS,
    dearest,
    distilling,
    fine_tuning,
    make_recipe,
    random_windows,
    run,
    summarise,
)
from kvfold.convert.request import FoldRequest
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite


@pytest.fixture(scope="module")
def fold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("training") / "fold"
    rewrite(make_plan(DEMO, FoldRequest(model=str(DEMO), to="mla", kv_budget="25%")), out)
    return out


@pytest.mark.parametrize(("train", "how"), KINDS)
def test_every_kind_trains(fold: Path, train: str, how: str) -> None:
    found = run(make_recipe(DEMO, fold, train, how, tokens=128, length=32), DEMO)
    assert found["seconds"] > 0


def test_plain_fine_tuning_is_cross_entropy_of_the_same_student(fold: Path) -> None:
    """The same gradient but for one token a window, which transformers does not predict.

    The second step too.
    """
    recipe = make_recipe(DEMO, fold, "all", "online", tokens=512, length=128)
    (stage,) = recipe.stages
    ours = distilling(
        recipe.model_copy(update={"stages": (stage.model_copy(update={"losses": {"ce": 1.0}}),)}), DEMO
    )
    plain = fine_tuning(recipe)
    for number in range(2):
        assert ours(number) == pytest.approx(plain(number), rel=0.05)


def test_a_cached_teacher_teaches_the_same(fold: Path, tmp_path: Path) -> None:
    own = tmp_path / "fold"  # the cache is next to it
    own.symlink_to(fold)
    online, written, cached = (
        distilling(make_recipe(DEMO, own, "all", how, tokens=256, length=64), DEMO)
        for how in ("online", CACHE, CACHE)
    )
    assert (tmp_path / CACHE).exists()
    for number in range(2):
        norm = online(number)
        assert written(number) == pytest.approx(norm, rel=1e-5)
        assert cached(number) == pytest.approx(norm, rel=1e-5)


def test_all_kinds_read_the_same_tokens(fold: Path) -> None:
    ours, plain = (
        random_windows(make_recipe(DEMO, fold, "all", how, 128, 32), 100) for how in ("online", "plain")
    )
    assert len(ours) == len(plain) == STEPS * 128 // 32
    assert torch.equal(ours.batch([3, 5]).input_ids_BS, plain.batch([3, 5]).input_ids_BS)
    assert ours.scored(range(len(ours))) == STEPS * 128


def test_ratios_are_to_the_plain_run_of_the_same_round() -> None:
    """A round in which the machine was three times as slow changes no ratio."""
    rounds = [
        {
            ("all", "plain"): {"seconds": 2 * slow, "peak_bytes": 4e6},
            ("attention", "plain"): {"seconds": 1 * slow, "peak_bytes": 2e6},
            ("attention", "shared"): {"seconds": odd * slow, "peak_bytes": 3e6},
        }
        for slow, odd in ((1, 1.3), (3, 1.3), (1, 9.9))
    ]
    row = summarise(("attention", "shared"), rounds)
    assert (row["times_plain"], row["times_plain_all"]) == (1.3, 0.65)
    assert (row["memory_times_plain"], row["memory_times_plain_all"]) == (1.5, 0.75)


def test_the_dearest_operation_comes_first() -> None:
    big, small = torch.ones(500, 500), torch.ones(5)
    found = dearest(lambda: [big @ big, small + small])
    assert found["operations"][0]["operation"] == "aten::mm"
    assert found["by_shape"][0]["operation"] == "aten::mm 500x500 500x500"
    assert found["operations"][0]["share"] > 0.5
