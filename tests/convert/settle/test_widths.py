"""The rotary width of MLA is measured next to the one that is predicted to lose least."""

import json
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.convert.algebra.target import LatentTarget
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.decide.draft import make_draft
from kvfold.convert.decide.plan import Draft, Plan
from kvfold.convert.efforts import MEASURED
from kvfold.convert.families.source import open_source
from kvfold.convert.request import fold_request
from kvfold.convert.settle import losses as of_layers
from kvfold.convert.settle import widths as of_widths
from kvfold.convert.settle.losses import spread_layers
from kvfold.convert.settle.settle import settle
from kvfold.convert.settle.widths import measure_widths, settle_width
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.errors import InvalidInput

from ...support.tiny import make

BUDGET = {"kv_budget": "50%", "container": "remote", "refine": 0}


def planned(source: Path, statistics: Statistics | None, **options: Any) -> Draft:
    request = fold_request({"model": str(source), "to": "mla", **BUDGET, **options})
    return make_draft(source, request, statistics)


def width_of(made: Plan | Draft) -> int:
    plan = made.plan if isinstance(made, Draft) else made
    assert isinstance(plan.target, LatentTarget)
    return plan.target.qk_rope_head_dim


def told(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> list[int]:
    """Let widths lose this much, and intact rotation nobody knows; return those asked for, in order."""
    asked: list[int] = []

    def loss(plan: Plan, description: str) -> float:
        asked.append(width_of(plan))
        return losses.get(asked[-1], 9.0)

    monkeypatch.setattr(of_widths, "measure_intact", lambda plan: None)
    monkeypatch.setattr(of_widths, "slots_loss", loss)
    return asked


def test_widths_that_lose_less(source: Path, statistics: Statistics, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(source, statistics)
    widths = sorted(plan.widths)
    at = widths.index(width_of(plan))
    assert 2 <= at < len(widths) - 1, "the source leaves no width to choose"
    near, far, wider = widths[at - 1], widths[at - 2], widths[at + 1]

    asked = told(monkeypatch, {widths[at]: 3.0, near: 2.0, far: 1.0})
    settled = settle_width(plan)
    assert asked[:3] == [widths[at], near, far]
    assert wider not in asked
    assert width_of(settled) == far
    assert settled.bands == plan.widths[far].bands
    assert sum(sum(loss.values()) for loss in settled.losses if loss) == settled.predicted
    (said,) = (one for one in settled.notices if "rotary width" in one)
    assert said.startswith(f"the rotary width is {far}: {widths[at]} is predicted")
    assert f"loses 3 nats with {widths[at]} and 1 with {far} on held-back" in said
    assert settled.request == plan.plan.request

    asked = told(monkeypatch, {widths[at]: 3.0, wider: 2.0})
    assert width_of(settle_width(plan)) == wider
    assert asked[:3] == [widths[at], near, wider]


def test_the_plan_stays_where_no_neighbour_loses_less(
    source: Path, statistics: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(source, statistics)
    asked = told(monkeypatch, {width_of(plan): 1.0})
    settled = settle_width(plan)
    assert len(asked) == 3
    assert settled == plan.plan


def test_a_layer_that_cannot_be_measured_keeps_the_plan(
    source: Path, statistics: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(source, statistics)
    monkeypatch.setattr(of_layers, "fold_attention", lambda plan, number: (None, None))
    assert width_of(settle_width(plan)) == width_of(plan)


def test_a_given_width_may_exceed_what_rotates_in_a_head(source: Path, tmp_path: Path) -> None:
    """Where statistics allocate the slots; without them there is nothing to allocate by."""
    wide = kvfold.MLA(rank=40, rope_dim=24)
    options: dict[str, Any] = {"calibration": "self", "sequences": 4, "length": 32, "refine": 0}
    kvfold.fold(source, wide, out=tmp_path / "out", container="remote", **options)
    target = json.loads((tmp_path / "out" / "kvfold.json").read_text())["target"]
    assert (target["qk_rope_head_dim"], target["slots"]) == (24, "allocated")
    with pytest.raises(InvalidInput, match=r"24 does not fit: 16 .* use calibration self"):
        kvfold.fold(source, wide, out=tmp_path / "none", container="remote", calibration="none")
    with pytest.raises(InvalidInput, match=r"rope_dim 24 does not fit slots uniform: 16 .* leave slots out"):
        kvfold.fold(source, wide, out=tmp_path / "none", container="remote", slots="uniform", **options)


def test_slots_of_a_given_width_for_every_rotary_table(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "gemma3_text", num_key_value_heads=4, head_dim=16)
    taken = study(open_source(source), "self", sequences=4, length=32, seed=0)
    tables = range(len(open_source(source).layers_by_table))
    assert len(tables) == 2
    for statistics in (None, taken):
        plan = planned(source, statistics, kv_budget=None, rank="40", rope_dim=24, rope="decoupled")
        slots = [sum(band.slots for band in plan.plan.bands if band.table == table) for table in tables]
        assert slots == [12, 12]


@pytest.mark.parametrize("given", [{"rope_dim": 8}, {"kv_budget": None, "rank": "24"}, {"slots": "uniform"}])
def test_a_width_that_is_given_is_kept(source: Path, statistics: Statistics, given: dict[str, Any]) -> None:
    plan = planned(source, statistics, **given)
    assert not plan.widths
    assert settle(plan) is plan.plan


def test_a_choice_of_form_stays_with_another_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a source with key norms, whose rotation is decoupled because that is predicted to cost little."""
    source = make(tmp_path / "source", "qwen3", num_key_value_heads=4, head_dim=16)
    taken = study(open_source(source), "self", sequences=4, length=32, seed=0)
    plan = planned(source, taken)
    (form,) = (one for one in plan.plan.notices if one.startswith("rotation is decoupled"))
    other = min(plan.widths.keys() - {width_of(plan)})
    told(monkeypatch, {width: float(width) for width in plan.widths})
    settled = settle_width(plan)
    assert width_of(settled) == other
    assert form in settled.notices


def test_measured_layers_stand_for_all() -> None:
    """Exactly where losses are as predicted, and by the heaviest layers first."""
    losses_L = [0.1, 8.0, 6.0, 0.2, 0.1, 0.3, 3.0, 0.1, 0.1, 0.1]
    for count in range(1, 12):
        factors = spread_layers(losses_L, count)
        assert len(factors) <= count
        estimate = sum(factor * losses_L[layer] for layer, factor in factors.items())
        assert estimate == pytest.approx(sum(losses_L))
    assert {1, 2, 6} <= spread_layers(losses_L, 4).keys()
    assert spread_layers([20.0, *[0.5] * 29], 8).keys() == {0, 3, 7, 11, 15, 19, 23, 27}
    even = {1: 2.5, 3: 2.5, 6: 2.5, 8: 2.5}
    for nothing in ([0.0] * 10, [1.0, float("nan")] * 5, [float("inf")] + [1.0] * 9):
        assert spread_layers(nothing, 4) == even


def test_losses_are_of_the_layers_that_lose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source", num_key_value_heads=4, head_dim=16, num_hidden_layers=12)
    taken = study(open_source(source), "self", sequences=4, length=32, seed=0)
    plan = planned(source, taken).plan
    predicted = [sum(loss.values()) for loss in plan.losses if loss]
    assert len(predicted) == 12
    folded: list[int] = []

    def as_predicted(_: Plan, number: int) -> tuple[None, dict[str, float]]:
        folded.append(number)
        return None, {"folded": 1.1 * predicted[number]}

    monkeypatch.setattr(of_layers, "fold_attention", as_predicted)
    found = of_layers.closed_form_loss(plan, "test")
    assert found == pytest.approx(1.1 * sum(predicted))
    assert max(range(12), key=lambda layer: predicted[layer]) in folded
    assert len(folded) <= MEASURED


def test_what_is_measured_is_what_is_recorded(source: Path, statistics: Statistics, tmp_path: Path) -> None:
    plan = planned(source, statistics)
    found = measure_widths(plan)
    assert found.keys() <= plan.widths.keys()
    width = min(found, key=lambda each: found[each])
    assert found[width] <= found[width_of(plan)]
    for each, loss in found.items():
        record = rewrite(settle(planned(source, statistics, rope_dim=each)), tmp_path / str(each))
        measured = sum(layer["measured"]["folded"] for layer in record["layers"])
        assert measured == pytest.approx(loss, rel=1e-3)


def test_convert_and_plan_choose_alike(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the command, its record, and the table of `kvfold plan`."""
    kept = tmp_path / "kept.safetensors"
    options: dict[str, Any] = {"calibration": "self", "sequences": 4, "length": 32, "refine": 0}
    target = kvfold.MLA(kv_budget="50%")
    kvfold.fold(source, target, out=tmp_path / "first", container="remote", save_statistics=kept, **options)
    first = json.loads((tmp_path / "first" / "kvfold.json").read_text())
    plan = planned(source, Statistics.load(kept))
    others = sorted(width for width in plan.widths if width != first["target"]["qk_rope_head_dim"])
    told(monkeypatch, {others[0]: 0.0} | {width: float(width) for width in plan.widths if width != others[0]})
    kvfold.fold(source, target, out=tmp_path / "out", container="remote", calibration=str(kept), refine=0)
    record = json.loads((tmp_path / "out" / "kvfold.json").read_text())
    assert record["target"]["qk_rope_head_dim"] == others[0]
    assert any("rotary width" in one for one in record["notices"])
    assert "rope_dim" not in record["request"]
    advice = kvfold.plan(source, context=64, budgets=["50%"], calibration=str(kept))
    labels = {row["label"] for row in advice.report["candidates"]}
    assert f"MLA {record['target']['kv_lora_rank']}+{others[0]}, remote" in labels
