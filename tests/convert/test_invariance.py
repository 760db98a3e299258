"""A fold does not depend on how its source is written: the same function in other weights loses the same."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.models.causal_lm import load_model

from ..support.rewritten import WAYS, Layer, Way, binary_channels, rewrite_source
from ..support.tiny import make

FOLDS: dict[str, dict[str, Any]] = {
    "gqa": {"to": "gqa", "kv_heads": 2, "refine": 0},
    "mqa": {"to": "mqa", "refine": 0},
    "mla": {"to": "mla", "kv_budget": "25%", "refine": 0, "latent_norm": "linear"},
    "mla, fitted norm": {"to": "mla", "kv_budget": "50%", "refine": 0, "latent_norm": "fitted"},
    "gqa, refined": {"to": "gqa", "kv_heads": 2, "refine": 4},
    "mla, refined": {"to": "mla", "kv_budget": "25%", "refine": 4, "latent_norm": "linear"},
}
Case = tuple[Path, Statistics]


def as_it_is(layer: Layer, draw: torch.Generator) -> Layer:
    return layer


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """A source written in a way, and its statistics on text of its own."""
    work = tmp_path_factory.mktemp("invariance")
    plain = make(work / "plain", num_key_value_heads=4, hidden_size=48, intermediate_size=64)

    @cache
    def written(way: Way, dtype: torch.dtype = torch.float32) -> Case:
        source = rewrite_source(plain, work / f"{way.__name__}-{dtype}", way, dtype=dtype)
        statistics = study(open_source(source), "self", sequences=16, length=24, seed=0)
        assert statistics is not None
        return source, statistics

    return written


def loss(source: Path, statistics: Statistics, out: Path, options: dict[str, Any]) -> float:
    """KL from the source to its fold on random tokens, nats."""
    plan = make_plan(source, fold_request({"model": str(source), "dtype": "float32", **options}), statistics)
    rewrite(plan, out)
    ids_BT = torch.randint(0, 97, (16, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        teacher, student = (
            load_model(path)(input_ids=ids_BT).logits.log_softmax(-1) for path in (source, out)
        )
    lost = float((teacher.exp() * (teacher - student)).sum(-1).mean())
    assert lost == lost, "the fold predicts NaN"
    return lost


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fold", FOLDS)
def test_a_fold_does_not_depend_on_how_its_source_is_written(
    tmp_path: Path, case: Callable[..., Case], fold: str, way: str
) -> None:
    losses = [
        loss(*case(how), tmp_path / name, FOLDS[fold])
        for name, how in (("plain", as_it_is), ("other", WAYS[way]))
    ]
    assert losses[0] > 1e-5
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("fold", ["gqa", "mla", "mla, refined"])
def test_nor_in_half_the_digits(tmp_path: Path, case: Callable[..., Case], fold: str) -> None:
    losses = [
        loss(*case(how, torch.bfloat16), tmp_path / name, FOLDS[fold])
        for name, how in (("plain", as_it_is), ("other", binary_channels))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def deaf(layer: Layer, draw: torch.Generator, sink: float = 0.0) -> Layer:
    """No query looks at the last rotary pair; channel 0 makes its keys a sink's."""
    pairs = layer.q_NHD.shape[1] // 2
    q_NHD, k_KHD = layer.q_NHD.clone(), layer.k_KHD.clone()
    q_NHD[:, [pairs - 1, 2 * pairs - 1]] = 0
    k_KHD[:, [pairs - 1, 2 * pairs - 1], 0] += sink * float(layer.k_KHD.norm(dim=1).mean())
    return replace(layer, q_NHD=q_NHD, k_KHD=k_KHD)


def sinking(layer: Layer, draw: torch.Generator) -> Layer:
    return deaf(layer, draw, 100.0)


@pytest.mark.parametrize("fold", [name for name in FOLDS if "refined" not in name])
def test_large_keys_no_query_sees_cost_nothing(tmp_path: Path, case: Callable[..., Case], fold: str) -> None:
    """Keys of a hundred times the norm, as attention sinks have them, are no reason to keep them."""
    losses = [loss(*case(how), tmp_path / how.__name__, FOLDS[fold]) for how in (deaf, sinking)]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("fold", ["gqa, refined", "mla, refined"])
def test_refinement_keeps_its_gain(tmp_path: Path, case: Callable[..., Case], fold: str) -> None:
    """Steps are as large as a tensor is on the whole, so such keys change them; not for the worse."""
    refined, sunk, closed = (
        loss(*case(how), tmp_path / f"{how.__name__}-{steps}", {**FOLDS[fold], "refine": steps})
        for how, steps in ((deaf, 4), (sinking, 4), (sinking, 0))
    )
    assert sunk < 1.05 * closed
    assert sunk < 1.05 * refined
