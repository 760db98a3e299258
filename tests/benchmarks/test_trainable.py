"""The benchmark of training: an output with a fitted norm is trained and rounded as its source is."""

from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks import trainable
from benchmarks.rounded_weights import BLOCK, in_four_bits, in_fp8
from benchmarks.ways_of_training import BATCH, RATES, STEPS, WAYS
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source

from ..support.tiny import make


def test_a_fitted_output_is_trained_as_its_source_and_a_linear_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {name: way for name, way in WAYS.items() if name.endswith(f" {max(RATES):g}")}
    assert len(ways) == 3
    monkeypatch.setattr(trainable, "WAYS", ways)
    source = make(tmp_path / "source", head_dim=4)
    # Every text is one rising sequence, which ten steps begin to teach.
    tokens_BT = (torch.arange(STEPS * BATCH)[:, None] * 7 + torch.arange(24)) % 97

    @cache
    def statistics() -> Statistics:
        return study(open_source(source), "self", sequences=8, length=48, seed=0)

    rows = {
        label: trainable.measure_row(
            source, tmp_path, label, options, statistics, {"refine": 3}, tokens_BT, tokens_BT[:8] + 1
        )
        for label, options in trainable.labels(["25%"], "25%").items()
    }
    fitted, linear, own = rows["fitted 25%"], rows["linear 25%"], rows["source"]
    assert own["AdamW 0.0002"] < own["before"] - 0.005, "the source learns nothing here"
    assert trainable.behind(fitted, own) < trainable.WITHIN
    assert trainable.behind(rows["remote 25%"], own) < trainable.WITHIN
    assert trainable.behind(linear, own) > trainable.WITHIN
    assert trainable.rounds_worse(fitted, own) < 1.5
    assert linear["float16"] > 10 * own["float16"]
    assert linear["FP8 weights"] > 2 * own["FP8 weights"]
    again = trainable.measure_row(source, tmp_path, "source", {}, statistics, {}, tokens_BT, tokens_BT)
    assert again == own, "a row that is there is not measured again"


def test_weights_are_rounded_to_few_values() -> None:
    weight = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    rounded = in_four_bits(weight)
    assert 2 <= len(rounded.flatten()[:BLOCK].unique()) <= 15
    assert (rounded - weight).abs().max() <= weight.abs().max() / 14 * 1.001
    assert ((in_fp8(weight) - weight).abs() <= weight.abs() / 16 + weight.abs().max() / 448 / 2**9).all()
    small = torch.cat([weight * 1e-7, weight])
    assert (in_fp8(small)[:7] == 0).all(), "one scale for the tensor loses what is small in it"
