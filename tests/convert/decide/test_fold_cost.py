"""Predicted costs follow the shapes and the rates that they are counted with."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvfold.convert.calibration.study import study
from kvfold.convert.cli import main
from kvfold.convert.decide.costs import fold_cost
from kvfold.convert.decide.costs.fold_cost import cost_of, predict_cost, show_seconds
from kvfold.convert.decide.plan import Plan
from kvfold.convert.families.source import open_source
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.core.machine_rates import Rates, measure_rates

from ...support.tiny import make

RATES = Rates(
    products=1e11, decoding=5e10, single=1e11, mixing=3e10, double=5e10, decomposition=3e9, stream=5e10,
    call=2e-6, threads=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("cost") / "source")


def plan(source: Path, **options: object) -> Plan:
    asked = {"model": str(source), "to": "mla", "kv_budget": "50%", **options}
    return make_plan(source, fold_request(asked))


def test_more_text_and_more_steps_take_longer(source: Path) -> None:
    few, many = (plan(source, sequences=number) for number in (8, 16))
    one, two = (predict_cost(each, "self", RATES).seconds for each in (few, many))
    assert two["statistics"] == pytest.approx(2 * one["statistics"])
    assert one["text"] < two["text"]
    assert predict_cost(many, "self+stdlib", RATES).seconds == {**two, "text": one["text"]}
    short, long = (predict_cost(plan(source, refine=steps), "self", RATES) for steps in (100, 200))
    grown = long.seconds["refinement"] - short.seconds["refinement"]
    closed = predict_cost(plan(source, refine=0), "self", RATES).seconds["measurement"]
    assert grown == pytest.approx(short.seconds["refinement"] - closed, rel=0.2)
    efforts = [
        predict_cost(plan(source, effort=name), "self", RATES).total for name in ("quick", "default", "best")
    ]
    assert efforts == sorted(efforts)


def test_an_effort_without_steps_is_not_said_to_refine(source: Path) -> None:
    quick = predict_cost(plan(source, effort="quick"), "self", RATES).seconds
    assert "refinement" not in quick
    assert quick["output projection"] > 0
    assert "output projection" not in predict_cost(plan(source), "self", RATES).seconds


def test_statistics_say_how_much_text_there_is(source: Path) -> None:
    """Whatever the effort and the length of a text to be read would be."""
    taken = study(open_source(source), "self", sequences=8, length=32, seed=0)
    sizes = {"kv_budget": None, "rank": "12", "rope_dim": 4}
    saved = make_plan(source, plan(source, **sizes).request, taken)
    asked = plan(source, **sizes, sequences=8, length=32)
    found, same = (predict_cost(each, "s.safetensors", RATES).seconds for each in (saved, asked))
    assert found["refinement"] == pytest.approx(same["refinement"])
    assert "statistics" not in found


def test_a_phase_takes_as_long_as_its_rates_say(source: Path) -> None:
    slow = replace(
        RATES, **{name: getattr(RATES, name) / 3 for name in vars(RATES) if name not in {"call", "threads"}}
    )
    slow = replace(slow, call=3 * RATES.call)
    once, thrice = (predict_cost(plan(source), "self", rates).seconds for rates in (RATES, slow))
    for phase in once.keys() - {"start"}:
        assert thrice[phase] == pytest.approx(3 * once[phase]), phase


def test_keys_of_fewer_heads_take_less_algebra(tmp_path: Path) -> None:
    """The size of a decomposition and of products is that of the keys, not the hidden size."""
    seconds = []
    for heads in (2, 1):
        source = make(tmp_path / str(heads), num_key_value_heads=heads)
        algebra = replace(RATES.of_calls(), call=0.0, double=RATES.double, decomposition=RATES.decomposition)
        seconds.append(predict_cost(plan(source), "none", algebra).seconds["closed form"])
    assert seconds[1] < 0.7 * seconds[0]


def test_what_is_not_done_costs_nothing(source: Path) -> None:
    by_weights = predict_cost(plan(source, calibration="none"), "none", RATES)
    assert by_weights.seconds.keys() == {"start", "closed form"}
    on_text = predict_cost(plan(source), "text.jsonl", RATES)
    assert "text" not in on_text.seconds
    saved = predict_cost(plan(source), "kept.safetensors", RATES)
    assert "statistics" not in saved.seconds
    assert by_weights.peak_bytes < on_text.peak_bytes
    assert fold_cost.cost_of(plan(source, method="svd")).seconds.keys() == {"start", "closed form"}


def test_a_rounded_length_is_counted_where_one_is_chosen(source: Path) -> None:
    ways: list[dict[str, object]] = [{}, {"latent_norm": "linear"}, {"refine": 0}, {"to": "gqa"}]
    costs = [predict_cost(plan(source, **options), "self", RATES).seconds for options in ways]
    assert ["rounded length" in cost for cost in costs] == [True, False, False, False]
    by_draws = [
        predict_cost(plan(source, effort=name), "self", RATES).seconds["rounded length"]
        for name in ("default", "best")
    ]
    assert by_draws == sorted(by_draws)


@pytest.mark.parametrize("ways", [{}, {"latent_norm": "linear"}, {"to": "gqa"}])
def test_preparing_a_cache_is_a_phase_of_its_own(source: Path, ways: dict[str, object]) -> None:
    plain = predict_cost(plan(source, **ways), "self", RATES).seconds
    found = predict_cost(plan(source, cache_dtype="int4", **ways), "self", RATES).seconds
    assert found.pop("quantised cache") > plain["refinement"], "which is done again"
    assert found == plain
    by_weights = predict_cost(plan(source, calibration="none", cache_dtype="int4", **ways), "none", RATES)
    assert "quantised cache" not in by_weights.seconds


@pytest.mark.parametrize("ways", [{}, {"to": "gqa"}])
@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"refine": 0}, {"refine": 1}),
        ({"refine": 50}, {"refine": 100}),
        ({"sequences": 8}, {"sequences": 16}),
        ({"length": 16}, {"length": 32}),
        ({"kv_budget": "25%"}, {"kv_budget": "50%"}),
        ({"cache_dtype": "fp8_e4m3"}, {"cache_dtype": "nvfp4"}),
    ],
)
def test_preparing_a_cache_takes_longer(
    source: Path, ways: dict[str, object], less: dict[str, object], more: dict[str, object]
) -> None:
    costs = [
        predict_cost(plan(source, **{"cache_dtype": "int4", **ways, **options}), "self", RATES)
        for options in (less, more)
    ]
    first, second = (cost.seconds["quantised cache"] for cost in costs)
    assert first < second


def test_layers_at_once_take_less_time_and_more_memory(source: Path) -> None:
    """Computing takes half the time; small operations take as long as one layer after the other."""
    four = replace(RATES, threads=4)
    one, several = (predict_cost(plan(source, jobs=jobs), "self", four) for jobs in (1, 2))
    for phase in ("closed form", "refinement", "rounded length"):
        assert several.seconds[phase] < one.seconds[phase]
    assert several.peak_bytes >= one.peak_bytes
    held = [predict_cost(plan(source, jobs=jobs), "self", four.of_calls()).seconds for jobs in (1, 2)]
    assert held[0] == pytest.approx(held[1])
    computed = one.seconds["refinement"] - held[0]["refinement"]
    assert several.seconds["refinement"] == pytest.approx(held[0]["refinement"] + computed / 2)


def test_rates_are_positive_and_leave_the_threads_as_they_are() -> None:
    threads = torch.get_num_threads()
    rates = measure_rates(64)
    assert torch.get_num_threads() == threads == rates.threads
    assert all(value > 0 for value in vars(rates).values())
    assert measure_rates(64) is rates


def test_a_dry_run_shows_the_cost(source: Path) -> None:
    words = [str(source), "--to", "gqa", "--kv-heads", "2", "--dry-run"]
    shown = json.loads(CliRunner().invoke(main, [*words, "--json"], catch_exceptions=False).stdout)["fold"]
    assert shown["seconds"] == pytest.approx(sum(shown["phases"].values()), abs=0.1)
    table = CliRunner().invoke(main, words, catch_exceptions=False).stdout
    assert "this fold" in table
    assert str(cost_of(plan(source))).startswith("about ")


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.4, "3 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text
