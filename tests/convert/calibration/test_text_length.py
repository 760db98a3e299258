"""Folds for texts of another length than the calibration text's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvfold.convert.algebra.metric import SPAN
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.calibration.text_length import at_context
from kvfold.convert.cli import main
from kvfold.convert.families.source import open_source
from kvfold.core.errors import InvalidInput

from ...support.tiny import make

SHORT = {"sequences": 2, "length": 8, "seed": 0}


def distances(statistics: Statistics | None) -> list[int]:
    assert statistics is not None
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


def test_where_text_breaks_down_is_kept_with_the_statistics(tmp_path: Path) -> None:
    source = open_source(make(tmp_path / "source"))
    taken = study(source, "self", **SHORT)
    assert taken is not None
    assert taken.reach is None
    for reach in (None, 16):
        file = tmp_path / f"{reach}.safetensors"
        replace(taken, reach=reach).save(file)
        assert Statistics.load(file).reach == reach


def test_the_context_is_recorded_and_decides_the_fold(tmp_path: Path) -> None:
    source = make(tmp_path / "source", max_position_embeddings=64)
    records = {}
    for context in ("8", "48", "0.0625k"):
        out = tmp_path / context
        options = ["--to", "mla", "--rank", "9", "--sequences", "2", "--length", "8", "--refine", "0"]
        done = CliRunner().invoke(
            main, [str(source), *options, "--context", context, "--out", str(out), "--json"]
        )
        assert done.exit_code == 0, done.output
        records[context] = json.loads((out / "kvfold.json").read_text(encoding="utf-8"))
    assert [record["request"]["context"] for record in records.values()] == [8, 48, 64]
    assert [record["calibration"].get("context") for record in records.values()] == [None, 48, 64]
    assert "--context 48" in records["48"]["command"]
    assert records["8"]["predicted_loss"] != records["48"]["predicted_loss"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--context", "65"], "--context 65 exceeds the source's max_position_embeddings, 64; use at most"),
        (["--context", "1"], "context"),
        (["--context", "soon"], "it should be a number of tokens, for example 8192 or 8k"),
        (["--context", "32", "--calibration", "none"], "--context 32 has no effect without calibration text"),
        (["--context", "32", "--method", "svd"], "--context 32 does not apply to --method svd"),
        (
            ["--context", "32", "--rank", "full"],
            "--context 32 has no effect where everything is kept; leave it out",
        ),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, options: list[str], sentence: str) -> None:
    source = make(tmp_path / "source", max_position_embeddings=64)
    out = tmp_path / "out"
    done = CliRunner().invoke(main, [str(source), "--to", "mla", "--rank", "9", *options, "--out", str(out)])
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())
    assert not out.exists()


@pytest.mark.parametrize(("family", "changes"), [("llama", True), ("qwen3", False)])
def test_grouped_queries_are_fitted_to_the_context_or_a_notice_says_why_not(
    tmp_path: Path, family: str, changes: bool
) -> None:
    source = make(tmp_path / "source", family, max_position_embeddings=64)
    weights, told = [], []
    for context in ("8", "64"):
        out = tmp_path / context
        options = ["--to", "gqa", "--kv-heads", "2", "--sequences", "2", "--length", "8", "--refine", "0"]
        options += ["--context", context, "--verify", "none", "--out", str(out)]
        done = CliRunner().invoke(main, [str(source), *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        weights.append((out / "model.safetensors").read_bytes())
        notices = json.loads((out / "kvfold.json").read_text(encoding="utf-8"))["notices"]
        told += [notice for notice in notices if "--context" in notice]
    assert (weights[0] != weights[1]) == changes
    reason = "has no effect on this fold: heads with norms are merged alike for every distance"
    assert told == ([] if changes else [f"--context {context} {reason}" for context in (8, 64)])


@pytest.mark.parametrize(
    ("family", "settings", "options", "notice"),
    [
        ("llama", {}, [], "--context 8192 counts as 4096: farther distances are not extrapolated"),
        (
            "llama",
            {},
            ["--rope", "intact"],
            "--context 8192 has no effect on this fold: its keys are rebuilt",
        ),
        ("mistral", {"sliding_window": 24}, [], "--context 8192 counts as 24: no layer reads farther"),
    ],
)
def test_a_context_that_counts_as_less_is_told(
    tmp_path: Path, family: str, settings: dict[str, int], options: list[str], notice: str
) -> None:
    source = make(tmp_path / "source", family, max_position_embeddings=8192, **settings)
    asked = ["--to", "mla", "--rank", "9", "--sequences", "2", "--length", "8", "--dry-run", "--json"]
    done = CliRunner().invoke(main, [str(source), *asked, "--context", "8192", *options])
    assert done.exit_code == 0, done.output
    (told,) = (text for text in json.loads(done.stdout)["notices"] if "--context" in text)
    assert told.startswith(notice)


def test_far_distances_are_finite(tmp_path: Path) -> None:
    source = open_source(make(tmp_path / "source", max_position_embeddings=512))
    found = at_context(source, study(source, "self", **SHORT), None)
    assert found is not None
    for layer in found.layers:
        assert bool(layer.distance_NT.isfinite().all())
        torch.testing.assert_close(
            layer.distance_NT.sum(1), torch.ones(len(layer.distance_NT), dtype=torch.float64)
        )
