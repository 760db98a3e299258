"""`kvfold plan --cache-dtype`: bytes of a cache in each number format, and the loss that it adds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import spearmanr  # type: ignore[import-untyped]

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.convert.layer.fold import fold_attention
from kvfold.convert.storage import cache_fit
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.cache_dtypes import cache_dtype
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.planning.candidates import Candidate, find_candidates
from kvfold.planning.demand import Bounds
from kvfold.planning.ranking import Row, place, predict_rows
from kvfold.texts.corpus import read_text

from ..support.commands import run_main

DEMO = Path(__file__).parents[2] / "recipes" / "demo"  # 8 heads of 16 in 6 layers, in bfloat16
BOUNDS = Bounds(context=200, batch=3, memory=None)
LABELS = ("GQA-4", "MLA 48+16, stock uniform", "MLA 64, rope intact")


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("statistics") / "demo.safetensors"
    study(open_source(DEMO), "self", sequences=8, length=128, seed=0, save=file)
    return file


@pytest.fixture(scope="module")
def found() -> dict[str, Candidate]:
    """Targets for texts as long as those of the statistics."""
    candidates, _ = find_candidates(open_source(DEMO), ("25%",))
    return {
        one.label: replace(one, request=one.request.model_copy(update={"context": 128})) for one in candidates
    }


@pytest.mark.parametrize(("label", "name", "each"), [
    ("GQA-4", "fp8_e4m3", 128.0),
    ("GQA-4", "int4", 8 * (8 + 4)),  # four keys and four values of 16, each with a scale
    ("GQA-4", "nvfp4", 8 * (8 + 1)),
    ("MLA 48+16, stock uniform", "int4", 32 + 4),
    ("MLA 48+16, stock uniform", "nvfp4", 32 + 4),
    ("MLA 64, rope intact", "int8", 64 + 4),
])  # fmt: skip
def test_bytes_count_their_scales(found: dict[str, Candidate], label: str, name: str, each: float) -> None:
    row = place(found[label], BOUNDS, cache_dtype(name))
    assert row.demand.cache == 3 * 200 * 6 * each
    assert row.share == each / (256 * 2)
    without = place(found[label], BOUNDS)
    assert without.decoding.bytes - row.decoding.bytes == without.demand.cache // 3 - 200 * 6 * each
    assert row.demand.weights == without.demand.weights
    assert row.demand.activations == without.demand.activations


def rows_of(found: dict[str, Candidate], names: tuple[str, ...], taken: Statistics | None) -> dict[Any, Row]:
    asked = []
    for label in filter(found.__contains__, LABELS):
        asked += [place(found[label], BOUNDS, None if name == "" else cache_dtype(name)) for name in names]
    return {
        (row.candidate.label, "" if row.kind is None else row.kind.name): row
        for row in predict_rows(asked, BOUNDS, taken)
    }


def test_losses_agree_with_measured_ones(
    found: dict[str, Candidate], statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_fit, "STEPS", 0)
    taken = Statistics.load(statistics)
    rows = rows_of(found, ("", "bfloat16", "fp8_e4m3", "int4"), taken)
    losses = {key: row.loss or 0.0 for key, row in rows.items()}
    predicted, measured = [], []
    for number, label in enumerate(LABELS):
        assert losses[label, "bfloat16"] == pytest.approx(losses[label, ""], rel=0.01)
        assert losses[label, ""] < losses[label, "fp8_e4m3"] < losses[label, "int4"]
        for name in ("fp8_e4m3", "int4"):
            out = tmp_path / f"{number}-{name}"
            rewrite(rows[label, name].asked, out)
            done = evaluate(
                out, None, read_text("stdlib"), Options(window=128, max_windows=4, cache_dtype=name)
            )
            measured.append(done.suites["storage"].kl.mean)
            predicted.append(losses[label, name] - losses[label, ""])
    assert float(spearmanr(predicted, measured).statistic) > 0.85, (predicted, measured)


@pytest.mark.parametrize("label", LABELS)
def test_coordinates_are_predicted_that_a_prepared_fold_begins_with(
    found: dict[str, Candidate], statistics: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    taken = Statistics.load(statistics)
    row = rows_of({label: found[label]}, ("int4",), taken)[label, "int4"]
    monkeypatch.setattr(cache_fit, "STEPS", 0)
    plan = replace(row.candidate.plan, request=row.asked.request)
    losses = [fold_attention(plan, number)[1] or {} for number in range(6)]
    assert row.loss == pytest.approx(sum(loss["stored"] for loss in losses), rel=1e-3)
    unprepared = sum(loss["unprepared"] for loss in losses)
    assert row.loss is not None
    assert row.loss < unprepared


def test_formats_that_an_engine_does_not_store_are_left_out() -> None:
    words = ["plan", str(DEMO), "--context", "256", "--budgets", "25%", "--engine", "transformers", "--json"]
    done = run_main(*words, "--cache-dtype", "bfloat16,fp8_e4m3,int4")
    report = json.loads(done.stdout)
    rows = [*report["candidates"], report["chosen"]]
    assert {row["label"].rpartition(", ")[2] for row in rows} == {"bfloat16", "fp8_e4m3"}
    assert all(("--cache-dtype fp8_e4m3" in row["command"]) == ("fp8_" in row["label"]) for row in rows)
    none = run_main(*words, "--cache-dtype", "int4", code=2)
    assert "no target is left: --cache-dtype int4 does not suit --engine transformers" in none.output


def test_by_weights_alone_formats_rank_too(found: dict[str, Candidate]) -> None:
    losses = {key: row.loss for key, row in rows_of(found, ("", "fp8_e4m3", "int4"), None).items()}
    for label in LABELS:
        plain, fp8, int4 = (losses[label, name] for name in ("", "fp8_e4m3", "int4"))
        assert None not in (plain, fp8, int4)
        assert (plain or 0) < (fp8 or 0) < (int4 or 0)


def test_targets_and_formats_are_ranked_together(statistics: Path) -> None:
    words = ["plan", str(DEMO), "--context", "256", "--batch", "16", "--budgets", "25%", "--memory", "6MB"]
    words += ["--cache-dtype", "bfloat16,fp8_e4m3,int4", "--calibration", str(statistics), "--json"]
    done = run_main(*words)
    report = json.loads(done.stdout)
    assert report["cache_dtypes"] == ["bfloat16", "fp8_e4m3", "int4"]
    labels = [row["label"] for row in report["candidates"]]
    assert {"GQA-4, fp8_e4m3", "MQA, int4"} <= set(labels)
    assert len(labels) == len({(row["label"], row["container"]) for row in report["candidates"]})
    fitting = [row for row in report["candidates"] if row["fits"]]
    assert 0 < len(fitting) < len(labels)
    assert [row["predicted_loss"] for row in fitting] == sorted(row["predicted_loss"] for row in fitting)
    assert report["chosen"]["label"] == fitting[0]["label"]
    own = report["source_stored"]
    assert [row["label"] for row in own] == [f"(the source, {name})" for name in report["cache_dtypes"]]
    assert [row["cache"]["bytes_share"] for row in own] == [1.0, 0.5, 0.375]
    assert own[0]["predicted_loss"] < own[1]["predicted_loss"] < own[2]["predicted_loss"]
    every = [*report["candidates"], *own]
    front = sorted((row["cache"]["bytes_per_token"], row["predicted_loss"]) for row in every if row["front"])
    assert 3 <= len(front) < len(every)
    assert [loss for _, loss in front] == sorted((loss for _, loss in front), reverse=True)


def test_a_table_marks_the_front(statistics: Path) -> None:
    words = ["plan", str(DEMO), "--context", "256", "--budgets", "25%", "--cache-dtype", "int8"]
    done = run_main(*words, "--calibration", statistics)
    assert "int8 *" in done.output
    assert "cache bytes" in done.output.replace("\n", " ")


def test_an_unknown_format_is_refused() -> None:
    done = run_main("plan", DEMO, "--cache-dtype", "int3", code=2)
    assert "--cache-dtype is 'int3'; it should be 'bfloat16', 'fp8_e4m3'" in done.output
