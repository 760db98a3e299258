"""The spectrum in kvfold.json: what a latent lost is what stands behind its rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.convert.algebra.spectrum import MOST, spectrum
from kvfold.convert.algebra.subspaces import low_rank

from ...support.folds import convert
from ...support.tiny import make


def layers(source: Path, out: Path, options: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    convert(source, *options.split(), out=out, code=0)
    record = json.loads((out / "kvfold.json").read_text())
    return record["layers"], record["target"]


@pytest.mark.parametrize("size", [1, 5, MOST, MOST + 1, 1000, 8192])
def test_few_numbers_from_the_first_to_the_last(size: int) -> None:
    energy = torch.arange(size, 0, -1, dtype=torch.float64)
    found = spectrum(energy)
    assert (found.size, len(found.index), len(found.cost)) == (size, min(size, MOST), min(size, MOST))
    assert (found.index[0], found.index[-1]) == (1, size)
    assert list(found.index) == sorted(set(found.index))
    assert found.cost == tuple(float(energy[number - 1]) / 2 for number in found.index)
    ratios = [later / earlier for earlier, later in zip(found.index[40:], found.index[41:], strict=False)]
    # Even in the logarithm once whole numbers allow it.
    assert size < 1000 or max(ratios) / min(ratios) < 1.05


def test_it_is_what_cutting_off_costs() -> None:
    """½ tr(G E C Eᵀ) of the rank-r approximation, for every r."""
    torch.manual_seed(0)
    rows_CD = torch.randn(12, 8, dtype=torch.float64)
    metric_1CC, input_DD = (x @ x.mT for x in (torch.randn(1, 12, 12).double(), torch.randn(8, 8).double()))
    for rank in range(1, 8):
        down_RD, up_CR, energy_M = low_rank(rows_CD, metric_1CC, input_DD, rank)
        error_CD = rows_CD - up_CR @ down_RD
        lost = torch.trace(metric_1CC[0] @ error_CD @ input_DD @ error_CD.mT) / 2
        assert sum(spectrum(energy_M).cost[rank:]) == pytest.approx(float(lost), rel=1e-8)


def test_a_calibrated_fold_loses_what_was_planned(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "llama")
    asked = "--to mla --kv-budget 50% --calibration self --sequences 4 --length 32 --refine 0"
    found, target = layers(source, tmp_path / "mla", asked)
    for layer in found:
        assert layer["spectrum"]["size"] <= MOST  # all of them are told
        behind = sum(layer["spectrum"]["cost"][target["kv_lora_rank"] :])
        assert behind == pytest.approx(layer["planned"]["latent"], rel=1e-6)


def test_which_folds_have_one(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "llama")
    intact, _ = layers(
        source, tmp_path / "intact", "--to mla --rope intact --kv-budget 12.5% --calibration none"
    )
    for layer in intact:
        assert layer["spectrum"]["cost"] == sorted(layer["spectrum"]["cost"], reverse=True)
    grouped, _ = layers(source, tmp_path / "mqa", "--to mqa --calibration none")
    assert [layer["spectrum"] for layer in grouped] == [None] * len(grouped)
