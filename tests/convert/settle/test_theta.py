"""The `rope_theta` of an output for engines is the one whose slots turn like the source's pairs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.decide.draft import make_draft
from kvfold.convert.decide.plan import Draft, Plan
from kvfold.convert.families.source import Source, open_source
from kvfold.convert.formats.serving import table, thetas
from kvfold.convert.formats.serving_widths import SERVING
from kvfold.convert.formats.stock import Stock
from kvfold.convert.request import fold_request
from kvfold.convert.settle import settle as of_theta
from kvfold.convert.settle.settle import settle, settle_table
from kvfold.convert.write.rewrite import rewrite

from ...support.tiny import make

OWN, FAST = 1e8, 1e4  # 8 pairs turn at 1, 0.1, ... 1e-7, of which 4 slots meet every second, or the fastest
IDS = torch.arange(48)[None] ** 2 * 7 % 97


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Four key heads of one content, so that a latent of 32 holds all keys and values without rotation."""
    rope = {"rope_type": "default", "rope_theta": OWN}
    place = tmp_path_factory.mktemp("table") / "source"
    return open_source(
        make(place, num_key_value_heads=4, head_dim=16, equal_heads=True, rope_parameters=rope)
    )


@pytest.fixture(scope="module")
def statistics(source: Source) -> Statistics:
    taken = study(source, "self", sequences=4, length=48, seed=0)
    assert taken is not None
    return taken


def planned(source: Source, statistics: Statistics | None, **options: Any) -> Draft:
    asked = {"rank": "32", "rope_dim": 8, "engines": "mlx", "refine": 0, "latent_norm": "linear", **options}
    return make_draft(
        source, fold_request({"model": str(source.checkpoint.directory), "to": "mla", **asked}), statistics
    )


def theta_of(plan: Plan) -> float:
    assert isinstance(plan.container, Stock)
    return float(plan.container.rope["rope_theta"])


def logits(directory: Path) -> Tensor:
    with torch.no_grad():
        out: Tensor = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()(IDS).logits
    return out


def test_slots_meet_the_pairs_that_turn(source: Source, statistics: Statistics, tmp_path: Path) -> None:
    """Pairs that hardly turn within the text need no slot, so such an output computes what the source does."""
    plan = planned(source, statistics)
    assert plan.thetas[:2] == (OWN, FAST)
    assert theta_of(plan.plan) == OWN
    settled = settle_table(plan)
    assert theta_of(settled) == FAST
    assert settled.request == plan.plan.request
    (said,) = (one for one in settled.notices if "rope_theta" in one)
    assert said.startswith("rope_theta becomes 10000, which changes the rotary frequencies that engines")

    expected = logits(source.checkpoint.directory)
    errors = []
    for name, each in (("own", plan.plan), ("fast", settled)):
        rewrite(each, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theta_of(each)
        errors.append(float((logits(tmp_path / name) - expected).abs().max()))
    assert errors[1] < 0.1 * errors[0]


def test_pairs_share_the_slots_that_are_left(source: Source, statistics: Statistics) -> None:
    """With as many slots as pairs, some pairs get two where heads differ, and every slot turns near its pair."""
    plan = make_draft(source, planned(source, None).plan.request, statistics, FAST).plan
    table_F, _ = source.slot_frequencies()
    assert plan.bands
    for band in plan.bands:
        (pair,) = band.pairs
        assert 0.5 < band.frequency / table_F[pair] < 2


def test_no_table_is_chosen_where_nothing_can_be_measured(
    source: Source, statistics: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_theta, "slots_loss", lambda *_: None)
    plan = planned(source, statistics)
    assert theta_of(settle_table(plan)) == OWN
    monkeypatch.setattr(of_theta, "slots_loss", lambda *_: pytest.fail("not to be measured"))
    for other in (
        planned(source, None),
        planned(source, statistics, effort="quick"),
        planned(source, statistics, slots="uniform"),
        planned(source, statistics, engines="transformers", container="remote", latent_norm="auto"),
    ):
        assert settle(other) is other.plan


def test_every_table_turns(tmp_path: Path) -> None:
    """Sources of few rotary pairs, far apart: no `rope_theta` is so large that slots stand still in float32."""
    for width, theta in ((8, 1e6), (2, 1e10)):
        rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": width / 32}
        place = make(tmp_path / f"source-{width}", "stablelm", hidden_size=256, rope_parameters=rope)
        opened = open_source(place)
        assert opened.rotary_width == width
        known = thetas(opened, SERVING)
        assert known[0] == theta
        for each in known:
            assert (table(SERVING, each) > 0).all()
