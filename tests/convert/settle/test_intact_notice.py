"""Where MLA's rotation is left open, a notice says what it would lose intact."""

from pathlib import Path
from typing import Any

import pytest

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.decide.draft import make_draft
from kvfold.convert.decide.plan import Draft
from kvfold.convert.families.source import open_source
from kvfold.convert.families.support import LIMIT
from kvfold.convert.request import fold_request
from kvfold.convert.settle import widths as of_widths
from kvfold.convert.settle.settle import settle
from kvfold.convert.settle.widths import measure_intact, measure_widths, settle_width
from kvfold.convert.write.rewrite import rewrite

from ...support.tiny import make

SAID = "--rope intact loses less"


def planned(source: Path, statistics: Statistics, **options: Any) -> Draft:
    asked = {"model": str(source), "to": "mla", "kv_budget": "25%", "refine": 0, **options}
    return make_draft(source, fold_request(asked), statistics)


def test_intact_rotation_is_measured_as_folded(source: Path, statistics: Statistics, tmp_path: Path) -> None:
    plan = planned(source, statistics, container="remote")
    found = measure_intact(plan.plan)
    record = rewrite(settle(planned(source, statistics, rope="intact")), tmp_path / "out")
    assert record["target"]["kv_lora_rank"] == 32
    assert found == pytest.approx(sum(layer["measured"]["folded"] for layer in record["layers"]), rel=1e-3)


@pytest.mark.parametrize("given", [{}, {"container": "remote"}, {"engines": ("transformers",)}])
def test_the_notice_says_what_is_measured(
    source: Path, statistics: Statistics, given: dict[str, Any]
) -> None:
    plan = planned(source, statistics, **given)
    intact, widths = measure_intact(plan.plan), measure_widths(plan)
    assert min(widths.values()) > intact
    is_told = min(widths.values()) - intact > LIMIT
    told = [one for one in settle_width(plan).notices if SAID in one]
    assert bool(told) == is_told


def test_clear_differences_are_told(
    source: Path, statistics: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = planned(source, statistics)

    def told(decoupled: float, intact: float | None) -> list[str]:
        monkeypatch.setattr(of_widths, "slots_loss", lambda *_: decoupled)
        monkeypatch.setattr(of_widths, "measure_intact", lambda _: intact)
        return [one for one in settle_width(draft).notices if SAID in one]

    assert told(1.0, None) == told(0.06, 0.02) == told(0.1, 0.3) == []
    (said,) = told(0.2225, 0.0963)
    assert "0.0963 instead of 0.2225 nats" in said


@pytest.mark.parametrize("given", [
    {"rope": "decoupled", "container": "remote"},
    {"rope_dim": 8, "container": "remote"},
    {"slots": "allocated", "container": "remote"},
    {"container": "stock"},
    {"engines": ("vllm",), "container": "remote"},
], ids=["form", "width", "slots", "stock class", "vLLM"])  # fmt: skip
def test_what_is_decided_is_not_measured(source: Path, statistics: Statistics, given: dict[str, Any]) -> None:
    if "engines" in given:
        source = make(source.parent / "wide", num_attention_heads=16, num_key_value_heads=16, head_dim=64)
        taken = study(open_source(source), "self", sequences=2, length=16, seed=0)
        assert taken is not None
        statistics, given = taken, {**given, "kv_budget": None, "rank": "512"}
    assert measure_intact(planned(source, statistics, **given).plan) is None


def test_sources_with_key_norms_have_a_choice_of_their_own(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "qwen3", num_key_value_heads=4, head_dim=16)
    taken = study(open_source(source), "self", sequences=4, length=32, seed=0)
    assert taken is not None
    assert measure_intact(planned(source, taken, container="remote", kv_budget="50%").plan) is None
