"""Decompositions that take a shorter way give what the longer way does (legend: subspaces.py, queries.py)."""

import pytest
import torch

from kvfold.checkpoints.shards import is_finite
from kvfold.convert.algebra import subspaces
from kvfold.convert.algebra.metric import LayerMetric
from kvfold.convert.algebra.queries import fit_queries
from kvfold.convert.algebra.subspaces import factor, leading, low_rank, low_rank_energy, matrix_root

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=dtype)


def moment(size: int, rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A positive semi-definite matrix of a rank."""
    rows = random(size, rank, dtype=dtype)
    return rows @ rows.mH / rank


def metric_of(distance_NT: torch.Tensor, head_dim: int = 4) -> LayerMetric:
    """The metric of heads that attend to some distances, without statistics."""
    blocks = torch.eye(head_dim, dtype=torch.float64).expand(len(distance_NT), -1, -1)
    return LayerMetric(
        input_EE=None, key_BSS=blocks, value_BSS=blocks, query_NHH=blocks, distance_NT=distance_NT
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("rank", [3, 8, 20])
def test_a_factor_times_itself_is_the_matrix(rank: int, dtype: torch.dtype) -> None:
    """Singular ones included, alone and among others."""
    matrices = torch.stack([moment(8, 20, dtype), moment(8, rank, dtype)])
    found = factor(matrices)
    torch.testing.assert_close(found @ found.mH, matrices, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [10, 40])
@pytest.mark.parametrize("moment_rank", [None, 30, 12])
def test_any_factor_will_do(rows: int, moment_rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than columns and fewer; the identity, a regular and a singular moment."""
    weights_CD, metric_BSS = random(rows, 16), torch.stack([moment(rows // 2, rows) for _ in range(2)])
    input_DD = None if moment_rank is None else moment(16, moment_rank)
    down, up, energy = low_rank(weights_CD, metric_BSS, input_DD, 5)
    torch.testing.assert_close(low_rank_energy(weights_CD, metric_BSS, input_DD)[:9], energy[:9])
    monkeypatch.setattr(subspaces, "factor", matrix_root)
    its_down, its_up, its_energy = low_rank(weights_CD, metric_BSS, input_DD, 5)
    torch.testing.assert_close(up @ down, its_up @ its_down)
    torch.testing.assert_close(energy[:9], its_energy[:9])


def test_keys_lose_what_the_energies_say() -> None:
    """tr(G E C Eᴴ) of what is left out, from the weights, is the sum of the energies beyond the rank."""
    rows_ME, metric_MM = random(6, 9, dtype=torch.complex128), moment(6, 12, torch.complex128)
    input_EE = moment(9, 20)
    keys_RE, shares_MR, energy_M = leading(rows_ME, metric_MM, rows_ME @ input_EE.to(rows_ME.dtype), 2)
    error_ME = rows_ME - shares_MR @ keys_RE
    lost = (metric_MM @ error_ME @ input_EE.to(rows_ME.dtype) @ error_ME.mH).diagonal().sum().real
    torch.testing.assert_close(lost, energy_M[2:].sum())


def test_a_slot_that_hardly_turns_is_not_weighed_against_the_latent() -> None:
    """A pair that turns little more could be read from their difference, by scores tens of times their sum."""
    slots_RE, slots_S = random(2, 12), torch.tensor([1e-3], dtype=torch.float64)
    keys_KHE = random(1, 4, 12)
    keys_KHE[0, [0, 2]] = slots_RE
    metric = metric_of(torch.softmax(random(1, 16), -1))
    table_F = torch.tensor([0.02, 1.0], dtype=torch.float64)
    slots_NRH, latent_NCH = fit_queries(keys_KHE, table_F, slots_RE, slots_S, slots_RE.clone(), 1, metric)
    # Of the pair that turns little, the two rows of its query together.
    assert float(slots_NRH[0, :, [0, 2]].abs().max()) < 2
    assert float(latent_NCH[0, :, [0, 2]].abs().max()) < 2
    read_RH = slots_NRH[0, :, [0, 2]] + latent_NCH[0, :, [0, 2]]
    torch.testing.assert_close(read_RH.diagonal(), torch.ones(2, dtype=torch.float64), atol=0.2, rtol=0)


def test_keys_that_are_a_small_difference_of_features_stay_read() -> None:
    """Of two rows of the latent that are nearly alike, a head's keys are the difference alone."""
    shared_E, small_E = torch.eye(12, dtype=torch.float64)[:2]
    latent_CE = torch.stack([shared_E, shared_E + 2.0**-6 * small_E])
    keys_KHE = torch.zeros(1, 2, 12, dtype=torch.float64)
    keys_KHE[0, 0] = small_E
    metric = metric_of(torch.full((1, 16), 1 / 16, dtype=torch.float64), head_dim=2)
    still_F = torch.zeros(1, dtype=torch.float64)
    none_RE, none_S = latent_CE[:0], still_F[:0]
    latent_NCH = fit_queries(keys_KHE, still_F, none_RE, none_S, latent_CE, 1, metric)[1]
    torch.testing.assert_close(latent_NCH[0].mT @ latent_CE, keys_KHE[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_is_not_finite_is_seen_wherever_it_is(dtype: torch.dtype) -> None:
    for size in (1, 7, 1000):
        tensor = random(size).to(dtype)
        assert is_finite(tensor)
        for bad in (float("nan"), float("inf"), -float("inf")):
            for place in {0, size // 2, size - 1}:
                broken = tensor.clone()
                broken[place] = bad
                assert not is_finite(broken)
    assert is_finite(tensor[:0])
