"""Predicted losses of rotary slots, and the assignment of a table's slots to a source's pairs."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from kvfold.convert.algebra import subspaces
from kvfold.convert.algebra.metric import weights_only
from kvfold.convert.methods import allocation
from kvfold.convert.methods.allocation import allocate, assign, saved, unslotted
from kvfold.convert.methods.latent import Band, Keys, lost_by_slots, saved_by_slots, separate, source_bands

from ...support.layers import FREQUENCIES_F, OWN, layer

LAYERS = [(each, weights_only(each, 64)) for each in (layer(0), layer(1))]


@pytest.mark.parametrize("slots", [0, 3, 7, 16])
def test_both_predictions_are_one(slots: int) -> None:
    """By what slots at the source's own frequencies save, and by what is left of keys in turn."""
    saved_LFK = saved(lambda: LAYERS, FREQUENCIES_F)
    bands = allocate(saved_LFK.sum(0), FREQUENCIES_F, slots)
    for (attention, metric), own_FK in zip(LAYERS, saved_LFK, strict=True):
        found = lost_by_slots(attention, FREQUENCIES_F, bands, metric)
        assert found == pytest.approx(unslotted(own_FK, bands), rel=1e-6, abs=1e-9)


def test_bands_of_one_pair_are_as_good_as_one_band() -> None:
    attention, metric = LAYERS[0]
    keys = Keys.of(attention, metric)
    whole = tuple(Band(frequency=band.frequency, pairs=band.pairs, slots=2) for band in OWN)
    apart = tuple(band for band in OWN for _ in range(2))
    rest, other = (separate(keys, FREQUENCIES_F, bands, metric).k_nope_KPE for bands in (whole, apart))
    torch.testing.assert_close(rest, other, atol=1e-9, rtol=0)


def test_slots_go_where_they_save_most() -> None:
    """No other assignment of a small table's slots saves more, by trying all of them."""
    slots_S = torch.stack([FREQUENCIES_F[0] * 0.8, FREQUENCIES_F[0], FREQUENCIES_F[1] * 1.5])
    saved_SFK = sum(Keys.of(a, m).saved_near(FREQUENCIES_F, slots_S, m) for a, m in LAYERS)
    saved_SX = torch.as_tensor(saved_SFK).flatten(1)
    most = max(
        sum(float(saved_SX[slot, part]) for slot, part in enumerate(parts))
        for parts in permutations(range(saved_SX.shape[1]), len(slots_S))
    )
    bands = assign(lambda: LAYERS, FREQUENCIES_F, slots_S)
    numbers = {float(frequency): slot for slot, frequency in enumerate(slots_S)}
    seen: dict[int, int] = {}
    found = 0.0
    for band in bands:  # those of a pair carry its components in turn
        (pair,) = band.pairs
        found += float(torch.as_tensor(saved_SFK)[numbers[band.frequency], pair, seen.get(pair, 0)])
        seen[pair] = seen.get(pair, 0) + 1
    assert found == pytest.approx(most, rel=1e-9)


def test_the_sources_own_table_is_its_own_assignment() -> None:
    bands = assign(lambda: LAYERS, FREQUENCIES_F, FREQUENCIES_F)
    assert {band.frequency for band in bands} <= set(FREQUENCIES_F.tolist())
    every = source_bands(FREQUENCIES_F, 4)
    for attention, metric in LAYERS:
        assert lost_by_slots(attention, FREQUENCIES_F, every, metric) < 1e-9
        nothing = lost_by_slots(attention, FREQUENCIES_F, (), metric)
        assert nothing == pytest.approx(float(saved_by_slots(attention, FREQUENCIES_F, metric).sum()) / 2)
        assert lost_by_slots(attention, FREQUENCIES_F, bands, metric) < nothing


def test_widths_are_compared_where_layers_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, of which the meta device takes the place: it refuses tensors of the CPU next to its own."""
    meta, seen = torch.device("meta"), []

    def energy(*given: torch.Tensor) -> torch.Tensor:
        seen.extend(part.device for part in given)
        return torch.ones(40, dtype=torch.float64)

    monkeypatch.setattr(allocation, "fitting_device", lambda: meta)
    monkeypatch.setattr(allocation, "low_rank_energy", energy)
    monkeypatch.setattr(subspaces, "factor", lambda metric: torch.linalg.cholesky_ex(metric)[0])
    attention, plain = LAYERS[0]
    costs = replace(plain, input_EE=torch.eye(attention.k_KHD.shape[-1] + 1, dtype=torch.float64))
    bands = (Band(frequency=0.5, pairs=(0, 1), slots=1), Band(frequency=0.1, pairs=(0, 1, 2, 3), slots=2))
    found = allocation.losses_by_width(
        lambda: [(attention, costs)], FREQUENCIES_F, 20, {6: bands}, {6: [0.25]}
    )
    assert seen == [meta] * 3
    assert found == {6: [{"slots": 0.25, "latent": (40 - 14) / 2}]}
