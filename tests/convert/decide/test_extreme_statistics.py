"""Statistics whose values are finite, but whose matrices cannot be decomposed."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.decide.preparation import prepare
from kvfold.convert.families.source import open_source
from kvfold.convert.request import fold_request
from kvfold.core.errors import InvalidInput
from kvfold.planning.candidates import find_candidates

SENTENCE = "the statistics cannot be decomposed, because their values are extreme"


def test_plans_by_extreme_statistics_end_in_one_sentence(
    source: Path, statistics: Statistics, tmp_path: Path
) -> None:
    layers = [
        replace(layer, input_EE=layer.input_EE * (1e308 / layer.input_EE.abs().max()))
        for layer in statistics.layers
    ]
    extreme = replace(statistics, layers=tuple(layers))
    saved = tmp_path / "saved.safetensors"
    extreme.save(saved)
    asked = {"model": str(source), "to": "mla", "kv_budget": "50%", "calibration": str(saved)}
    with pytest.raises(InvalidInput, match=SENTENCE):
        prepare(fold_request(asked), dry_run=True)
    candidates, _ = find_candidates(open_source(source), ("50%",), None)
    latent = next(one for one in candidates if one.kind == "mla decoupled")
    with pytest.raises(InvalidInput, match=SENTENCE):
        latent.with_statistics(extreme)
