"""Storage formats of caches: numbers they hold exactly, rounding, clamping, bytes."""

import pytest
import torch

from kvfold.core.cache_dtypes import CACHE_DTYPES, cache_dtype
from kvfold.core.errors import InvalidInput


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_what_was_read_is_stored_unchanged(name: str) -> None:
    torch.manual_seed(0)
    kind = cache_dtype(name)
    read = kind.stored(torch.randn(5, 3, 24))
    assert read.shape == (5, 3, 24)
    torch.testing.assert_close(kind.stored(read), read, rtol=1e-6, atol=0)
    assert kind.stored(torch.randn(4, 16).bfloat16()).dtype == torch.bfloat16
    assert not kind.stored(torch.zeros(2, 16)).any()


@pytest.mark.parametrize(("name", "most"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0), ("nvfp4", 6 * 448.0)])
def test_the_largest_number_bounds_what_is_stored(name: str, most: float) -> None:
    values = torch.tensor([1e6, -1e6])
    assert cache_dtype(name).stored(values).tolist() == [most, -most]
    assert cache_dtype(name).stored(values, scale=2.0).tolist() == [2 * most, -2 * most]


def test_four_bits_round_half_to_even() -> None:
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    read = cache_dtype("nvfp4").stored(torch.tensor([*halves, *(-half for half in halves), 6.0, 0.0]))
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert read.tolist() == [*expected, *(-half for half in expected), 6.0, 0.0]


@pytest.mark.parametrize(("name", "most"), [("int8", 1 / 254), ("int4", 1 / 14), ("nvfp4", 1 / 6)])
def test_errors_follow_each_token_s_own_scale(name: str, most: float) -> None:
    values = torch.randn(64, 48) * torch.logspace(0, 2, 64)[:, None]
    error = (cache_dtype(name).stored(values) - values).abs().amax(-1) / values.abs().amax(-1)
    assert 0.3 * most < float(error.max()) < 1.1 * most


def test_bytes() -> None:
    found = {name: kind.bytes(576) for name, kind in CACHE_DTYPES.items()}
    assert found == {
        "bfloat16": 1152, "fp8_e4m3": 576, "fp8_e5m2": 576, "nvfp4": 288 + 36, "int8": 580, "int4": 292,
    }  # fmt: skip
    assert cache_dtype("nvfp4").bytes(20) == 10 + 2
    assert cache_dtype("int4").bytes(0) == 0


def test_an_unknown_name() -> None:
    with pytest.raises(InvalidInput, match=r"cache dtype 'fp4' is not known; use one of bfloat16, fp8_e4m3"):
        cache_dtype("fp4")


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_numbers_pass_with_a_gradient(name: str) -> None:
    """With a gradient of 1 for every number, by Euler's theorem, Σ values · gradient is the sum of what is read."""
    kind, values = cache_dtype(name), torch.randn(3, 24, requires_grad=True)
    read = kind.passed(values)
    torch.testing.assert_close(read, values if name == "bfloat16" else kind.stored(values))
    read.sum().backward()
    torch.testing.assert_close((values * values.grad).sum(), read.sum(), rtol=1e-4, atol=1e-4)
