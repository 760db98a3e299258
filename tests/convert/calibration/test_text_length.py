"""Folds for texts of another length than the calibration text's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfold.convert.algebra.metric import SPAN
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.calibration.text_length import at_context
from kvfold.convert.families.source import open_source
from kvfold.core.errors import InvalidInput

from ...support.folds import convert
from ...support.tiny import make

SHORT = {"sequences": 2, "length": 8, "seed": 0}


def read(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / "kvfold.json").read_text(encoding="utf-8"))
    return record


def distances(statistics: Statistics | None) -> list[int]:
    return [layer.distance_NT.shape[1] for layer in statistics.layers]


def test_distances_reach_to_the_positions_or_as_asked(tmp_path: Path) -> None:
    source = open_source(make(tmp_path / "source", max_position_embeddings=64))
    taken = study(source, "self", **SHORT)
    assert taken is not None
    assert distances(at_context(source, taken, None)) == [64, 64]
    assert distances(at_context(source, taken, 20)) == [20, 20]
    assert distances(at_context(source, taken, 5)) == [5, 5]
    assert distances(at_context(source, replace(taken, reach=16), None)) == [16, 16]
    assert distances(at_context(source, replace(taken, reach=16), 32)) == [32, 32]
    assert at_context(source, None, 20) is None
    again = at_context(source, at_context(source, taken, 20), 20)
    assert distances(again) == [20, 20]
    with pytest.raises(InvalidInput, match="--context 65 exceeds the source's max_position_embeddings, 64"):
        at_context(source, taken, 65)


def test_distances_end_with_the_prior_and_at_windows(tmp_path: Path) -> None:
    source = open_source(make(tmp_path / "source", max_position_embeddings=2 * SPAN))
    taken = study(source, "self", **SHORT)
    assert distances(at_context(source, taken, None)) == [SPAN, SPAN]
    windowed = make(tmp_path / "windowed", "mistral", max_position_embeddings=64, sliding_window=24)
    assert distances(at_context(open_source(windowed), taken, None)) == [24, 24]


def test_the_context_is_recorded_and_decides_the_fold(tmp_path: Path) -> None:
    source = make(tmp_path / "source", max_position_embeddings=64)
    records = {}
    for context in ("8", "48", "0.0625k"):
        out = tmp_path / context
        options = ["--to", "mla", "--rank", "9", "--sequences", "2", "--length", "8", "--refine", "0"]
        convert(source, *options, "--context", context, out=out, code=0)
        records[context] = read(out)
    assert [record["request"]["context"] for record in records.values()] == [8, 48, 64]
    assert [record["calibration"].get("context") for record in records.values()] == [None, 48, 64]
    assert "--context 48" in records["48"]["command"]
    assert records["8"]["predicted_loss"] != records["48"]["predicted_loss"]


@pytest.mark.parametrize(("options", "sentence"), [
    (["--context", "65"], "--context 65 exceeds the source's max_position_embeddings, 64; use at most"),
    (["--context", "1"], "context"),
    (["--context", "soon"], "it should be a number of tokens, for example 8192 or 8k"),
    (["--context", "32", "--calibration", "none"], "--context 32 has no effect without calibration text"),
    (["--context", "32", "--method", "svd"], "--context 32 does not apply to --method svd"),
    (["--context", "32", "--rank", "full"], "--context 32 has no effect where everything is kept; leave it"),
])  # fmt: skip
def test_mistakes_are_one_sentence(tmp_path: Path, options: list[str], sentence: str) -> None:
    source = make(tmp_path / "source", max_position_embeddings=64)
    out = tmp_path / "out"
    done = convert(source, "--to", "mla", "--rank", "9", *options, out=out, code=2)
    assert sentence in " ".join(done.output.split())
    assert not out.exists()


@pytest.mark.parametrize(("family", "changes"), [("llama", True), ("qwen3", False)])
def test_grouped_queries_are_fitted_or_a_notice_says_why(tmp_path: Path, family: str, changes: bool) -> None:
    source = make(tmp_path / "source", family, max_position_embeddings=64)
    weights, told = [], []
    for context in ("8", "64"):
        out = tmp_path / context
        options = ["--to", "gqa", "--kv-heads", "2", "--sequences", "2", "--length", "8", "--refine", "0"]
        convert(source, *options, "--context", context, "--verify", "none", out=out, code=0)
        weights.append((out / "model.safetensors").read_bytes())
        notices = read(out)["notices"]
        told += [notice for notice in notices if "--context" in notice]
    assert (weights[0] != weights[1]) == changes
    reason = "has no effect on this fold: heads with norms are merged alike for every distance"
    assert told == ([] if changes else [f"--context {context} {reason}" for context in (8, 64)])


@pytest.mark.parametrize(("family", "settings", "options", "notice"), [
    ("llama", {}, [], "--context 8192 counts as 4096: farther distances are not extrapolated"),
    ("llama", {}, ["--rope", "intact"], "--context 8192 has no effect on this fold: its keys are rebuilt"),
    ("mistral", {"sliding_window": 24}, [], "--context 8192 counts as 24: no layer reads farther"),
])  # fmt: skip
def test_a_context_that_counts_as_less_is_told(
    tmp_path: Path, family: str, settings: dict[str, int], options: list[str], notice: str
) -> None:
    source = make(tmp_path / "source", family, max_position_embeddings=8192, **settings)
    asked = ["--to", "mla", "--rank", "9", "--sequences", "2", "--length", "8", "--dry-run", "--json"]
    done = convert(source, *asked, "--context", "8192", *options, out=tmp_path / "out", code=0)
    (told,) = (text for text in json.loads(done.stdout)["notices"] if "--context" in text)
    assert told.startswith(notice)
