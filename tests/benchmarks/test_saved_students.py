"""The benchmark of saved students: rounding to the nearest takes a short training back."""

from pathlib import Path

import pytest

import kvfold
from benchmarks.saved_students import measure

DEMO = Path(__file__).parents[2] / "recipes" / "demo"


def test_the_nearest_numbers_are_the_old_ones_after_tiny_steps(tmp_path: Path) -> None:
    fold = kvfold.fold(
        DEMO, kvfold.MLA(kv_budget="25%"), out=tmp_path / "fold", calibration="none", length=64
    )
    settings = {"data.source": "stdlib", "data.seq_len": 64, "stages.0.tokens": 256, "stages.0.lr": 1e-6}
    row = measure(fold.directory, "stdlib", tmp_path, settings, window=64, max_windows=2)
    lost, back = row["lost"], row["taken_back"]
    assert lost["nearest"] == pytest.approx(lost["fold"], abs=1e-4)
    assert 1 > back["nearest"] > back["fair"] > 0.9
