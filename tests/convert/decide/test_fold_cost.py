"""Predicted costs: hand-counted operations, and more work takes longer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvfold.convert.calibration.study import study
from kvfold.convert.cli import main
from kvfold.convert.decide.fold_cost import Work, _Counts, cost_of, predict_cost, show_seconds
from kvfold.convert.decide.plan import Plan
from kvfold.convert.families.source import open_source
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.core.machine_rates import Rates, measure_rates

from ...support.tiny import make

RATES = Rates(products=1e11, decomposition=3e9, stream=5e10, call=2e-6, threads=1)
# 4 heads of 8 and as many of keys, hidden size 32, 16 tokens of calibration
SIZES = {"sequences": 2, "length": 8}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(
        tmp_path_factory.mktemp("cost") / "source",
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_hidden_layers=2,
    )  # fmt: skip


def plan(source: Path, **options: object) -> Plan:
    return make_plan(source, fold_request({"model": str(source), "to": "mla", "kv_budget": "50%", **options}))


def test_seconds_are_operations_over_rates() -> None:
    work = Work(flop=2e11, moved=5e10, cubes=6e9, calls=1e6)
    assert work.seconds(RATES, 1) == pytest.approx(2 + 1 + 2 + 2)
    assert work.seconds(RATES, 2) == pytest.approx(5 / 2 + 2), "small operations wait for each other"
    assert work + work == 2 * work


def test_a_token_in_attention_is_counted_as_by_hand(source: Path) -> None:
    """Four projections of 32 x 32, and scores and values of 8 tokens in 4 heads over half of the pairs."""
    counts = _Counts(plan(source, **SIZES), "self")
    assert counts._of_source().flop == 2 * 4 * 32 * 32 + 2.5 * 2 * 8 * 32
    assert counts._of_source().moved == 24 * 32 * 4
    pooled = _Counts(plan(source, to="gqa", kv_budget=None, kv_heads=2, **SIZES), "self")
    loss = 32 * 32
    # keys and values of two heads; the rest as in the source
    assert pooled._of_folded().flop == 2 * (2 * 32 * 32 + 2 * 32 * 16 + loss) + 2.5 * 2 * 8 * 32


def test_a_closed_form_is_counted_as_by_hand(source: Path) -> None:
    counted = _Counts(plan(source, rank=12, rope_dim=4, kv_budget=None), "none").of_layers()
    hidden = keys = 32
    assert counted == {
        "closed form": 2 * Work(flop=2 * hidden * keys * (15 * hidden + 12 * keys), cubes=hidden**3)
    }


@pytest.mark.parametrize("ways", [{}, {"to": "gqa"}, {"cache_dtype": "int4"}])
@pytest.mark.parametrize(("less", "more"), [
    ({"effort": "quick"}, {"effort": "default"}),
    ({"refine": 0}, {"refine": 1}),
    ({"refine": 50}, {"refine": 100}),
    ({"sequences": 8}, {"sequences": 16}),
    ({"length": 16}, {"length": 32}),
    ({"cache_dtype": "bfloat16"}, {"cache_dtype": "nvfp4"}),
])  # fmt: skip
def test_more_work_takes_longer(
    source: Path, ways: dict[str, object], less: dict[str, object], more: dict[str, object]
) -> None:
    first, second = (
        predict_cost(plan(source, **{**ways, **options}), "self", RATES) for options in (less, more)
    )
    assert first.total < second.total
    for phase in first.seconds.keys() & second.seconds.keys():
        assert first.seconds[phase] <= second.seconds[phase]


def test_phases_are_those_of_the_work(source: Path) -> None:
    def phases(read: str, **options: object) -> set[str]:
        return set(predict_cost(plan(source, **options), read, RATES).seconds) - {"start"}

    fitted = {"closed form", "refinement", "rounded length"}
    assert phases("none", calibration="none") == {"closed form"}
    assert phases("self") == fitted | {"text", "statistics"}
    assert phases("text.jsonl") == fitted | {"statistics"}
    assert phases("kept.safetensors") == fitted
    assert phases("kept.safetensors", latent_norm="linear") == {"closed form", "refinement"}
    assert phases("kept.safetensors", effort="quick") == {"closed form", "output projection"}
    assert phases("kept.safetensors", cache_dtype="int4") == fitted | {"quantised cache"}
    assert cost_of(plan(source, method="svd")).seconds.keys() == {"start", "closed form"}


def test_statistics_say_how_much_text_there_is(source: Path) -> None:
    """Whatever the effort and the length of a text to be read would be."""
    taken = study(open_source(source), "self", sequences=8, length=32, seed=0)
    sizes = {"kv_budget": None, "rank": "12", "rope_dim": 4}
    saved = make_plan(source, plan(source, **sizes).request, taken)
    asked = plan(source, **sizes, sequences=8, length=32)
    found, same = (predict_cost(each, "s.safetensors", RATES).seconds for each in (saved, asked))
    assert found == same


def test_layers_at_once_take_less_time_and_more_memory(source: Path) -> None:
    """Computing takes half the time; small operations take as long as one layer after the other."""
    four = replace(RATES, threads=4)
    one, two = (predict_cost(plan(source, jobs=jobs), "self", four) for jobs in (1, 2))
    work = _Counts(plan(source), "self").of_layers()["refinement"]
    saved = work.seconds(replace(RATES, call=0), 1) / 2
    assert one.seconds["refinement"] - two.seconds["refinement"] == pytest.approx(saved)
    assert two.peak_bytes >= one.peak_bytes


def test_rates_are_positive_and_leave_the_threads_as_they_are() -> None:
    threads = torch.get_num_threads()
    rates = measure_rates(64)
    assert torch.get_num_threads() == threads == rates.threads
    assert all(value > 0 for value in vars(rates).values())
    assert measure_rates(64) is rates


def test_a_dry_run_shows_the_cost(source: Path) -> None:
    words = [str(source), "--to", "gqa", "--kv-heads", "2", "--dry-run"]
    shown = json.loads(CliRunner().invoke(main, [*words, "--json"], catch_exceptions=False).stdout)["fold"]
    assert shown.keys() == {"seconds", "phases", "peak_bytes"}
    assert shown["seconds"] == pytest.approx(sum(shown["phases"].values()), abs=0.1)
    table = CliRunner().invoke(main, words, catch_exceptions=False).stdout
    assert "this fold" in table
    assert str(cost_of(plan(source))).startswith("about ")


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.4, "3 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text
