"""Statistics whose values are finite, but whose matrices cannot be decomposed."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.families.source import open_source
from kvfold.convert.request import fold_request
from kvfold.convert.settle.preparation import prepare
from kvfold.core.errors import InvalidInput
from kvfold.planning.candidates import find_candidates

from ...support.warm_python import warm_python

SENTENCE = "the statistics cannot be decomposed, because their values are extreme"


def test_plans_of_extremes_are_refused(source: Path, statistics: Statistics, tmp_path: Path) -> None:
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
    candidates, _ = find_candidates(open_source(source), ("50%",))
    latent = next(one for one in candidates if one.kind == "mla decoupled")
    with pytest.raises(InvalidInput, match=SENTENCE):
        latent.with_statistics(extreme)


def test_negated_statistics_are_refused(source: Path, statistics: Statistics, tmp_path: Path) -> None:
    """In a process of its own, since MKL ends the process at a matrix with values that are not finite."""
    layers = [replace(layer, input_EE=-layer.input_EE) for layer in statistics.layers]
    saved = tmp_path / "saved.safetensors"
    replace(statistics, layers=tuple(layers)).save(saved)
    words = ["convert", source, "--to", "gqa", "--kv-budget", "50%", "--calibration", saved, "--refine", "0"]
    command = [warm_python(), "-m", "kvfold", *map(str, words), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done
    assert "cannot be decomposed, because their values are extreme" in done.stderr
