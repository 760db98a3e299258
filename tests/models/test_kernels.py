"""The fused kernel by Triton's interpreter (on a GPU: benchmarks.kernels, benchmarks.cuda_check)."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.models.shipped import decoding_kvfold
from kvfold.models.shipped import kernels_kvfold as kernels

needs_triton = pytest.mark.skipif(
    kernels.triton is None, reason="Triton is not installed: pip install 'kvfold[kernels]'"
)
MODULE = SimpleNamespace(softcap=None, sinks=None, config=SimpleNamespace(_attn_implementation="sdpa"))


def tensors(length: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, their rotated columns, cached latents and rotary keys, and a mask."""
    torch.manual_seed(0)
    query, turned, latent, rope = (
        torch.randn(2, *shape) for shape in ((3, length, 24), (3, length, 8), (9, 24), (9, 8))
    )
    return query, turned, latent, rope, torch.ones(2, 1, length, 9, dtype=torch.bool).tril(9 - length)


@needs_triton
def test_the_kernel_computes_what_plain_products_do() -> None:
    command = [sys.executable, "-m", "tests.support.kernel_cases"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    for name, difference in seen["differences"].items():
        assert difference < (2e-3 if name == "half precision" else 1e-6), name
    assert seen["found"] == seen["expected"]
    assert seen["calls"] > 3 * 2 * 6, "every decoding step of every layer"


@needs_triton
@pytest.mark.parametrize("rows", [1, 32, 256, 2048])
@pytest.mark.parametrize("rank", [16, 40, 256, 384, 512, 1024])
@pytest.mark.parametrize("splits", [1, 2, 16, 132])
def test_partial_sums_are_joined_in_shapes_that_a_gpu_takes(rows: int, rank: int, splits: int) -> None:
    part, together = kernels._join_shape(rows, rank, splits, processors=132)
    assert part & (part - 1) == together & (together - 1) == 0, "powers of two"
    assert part >= 16
    assert 1 <= together <= max(1, 2 * splits)
    assert part * together <= 4096
    programs = rows * -(-rank // part)
    assert part <= 64 or programs >= 2 * 132, "each processor has work"


@needs_triton
def test_it_compiles_for_gpus_that_are_not_here() -> None:
    """Some choice of tiles fits every card: 99 KB of shared memory are there on all since 2020."""
    command = [sys.executable, "-m", "benchmarks.kernels", "--compile", "--rank", "512", "--json"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)["rows"]
    assert {row["capability"] for row in rows} == {80, 86, 90}
    for capability, masked in {(row["capability"], row["masked"]) for row in rows}:
        own = [row for row in rows if (row["capability"], row["masked"]) == (capability, masked)]
        assert min(row["shared_bytes"] for row in own) <= 99 * 1024
        assert all(row["spilled_bytes"] < 100 for row in own)


def test_plain_products_are_those_of_decoding() -> None:
    query, turned, latent, rope, mask = tensors()
    up_NEC = torch.eye(24)[None].repeat(3, 2, 1)  # keys and values are the latent itself
    whole = torch.cat([query, turned], -1)
    expected, _ = decoding_kvfold.attend(whole, latent[:, None], rope[:, None], up_NEC, mask, 0.2, MODULE)
    torch.testing.assert_close(kernels.plain(query, turned, latent, rope, mask, 0.2), expected)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    torch.testing.assert_close(kernels.plain(query, turned, latent, rope, added, 0.2), expected)


def test_one_operation_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the result's shape known beforehand, as torch.compile and CUDA graphs want it."""
    monkeypatch.setattr(kernels, "_choice", lambda *_, **__: None)
    given = tensors()
    torch.library.opcheck(kernels.latent_sums, (*given, 0.2), test_utils=("test_schema", "test_faketensor"))
    compiled: Any = torch.compile(kernels.latent_sums, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given, 0.2), kernels.plain(*given, 0.2))


@pytest.mark.parametrize(("kernel", "words"), [
    (lambda *_: (_ for _ in ()).throw(RuntimeError("out of resource: shared memory")),
     "RuntimeError: out of resource"),
    (lambda *given: kernels.plain(*given) * 1.1, "differs from plain products by 1.0e-01"),
])  # fmt: skip
def test_plain_products_without_a_kernel(kernel: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once tried, it is not tried again; one warning says why."""
    tried = []

    def fused(*given: Any, **_: int) -> Tensor:
        tried.append(given)
        wrong: Tensor = kernel(*given)
        return wrong

    monkeypatch.setattr(kernels, "fused", fused)
    monkeypatch.setattr(kernels, "_processors", lambda _: 3)
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    given = tensors()
    with pytest.warns(UserWarning, match=f"fused kernel for latent attention is not used here: .*{words}"):
        first = kernels.latent_sums(*given, 0.2)
    assert torch.equal(first, kernels.plain(*given, 0.2))
    assert torch.equal(kernels.latent_sums(*given, 0.2), first)
    assert len(tried) == len(kernels.TILES[4])


def test_the_first_tile_that_agrees_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(*given: Any, tile: int, **_: int) -> Tensor:
        return kernels.plain(*given) * (1.0 if tile == kernels.TILES[4][1][0] else 1.1)

    monkeypatch.setattr(kernels, "fused", fused)
    monkeypatch.setattr(kernels, "_processors", lambda _: 3)
    monkeypatch.setattr(kernels, "_chosen", {})
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    given = tensors()
    assert kernels._choice(*given, scale=0.2) is None, "nothing is compared while a graph is recorded"
    capturing[0] = False
    assert kernels._choice(*given, scale=0.2) == kernels.TILES[4][1]


def test_what_sees_nothing_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle row of a batch is nothing to the kernel, and a mean of everything to a softmax."""
    *given, mask = tensors()
    mask[1] = False

    def fused(*given: Any, **_: int) -> Tensor:
        return kernels.plain(*given) * given[4][..., :9].any(-1, keepdim=True)

    monkeypatch.setattr(kernels, "fused", fused)
    monkeypatch.setattr(kernels, "_processors", lambda _: 3)
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert kernels._choice(*given, mask, scale=0.2) == kernels.TILES[4][0]


def test_scores_beyond_half_precision_before_they_are_scaled() -> None:
    given = [tensor.half() * 40 for tensor in tensors()[:4]]
    exact = kernels.plain(*(tensor.double() for tensor in given), None, 1e-3)
    torch.testing.assert_close(kernels.plain(*given, None, 1e-3).double(), exact, atol=0.3, rtol=0.02)


@needs_triton
def test_what_the_kernel_takes() -> None:
    """Inference on a GPU, of widths that fit, where nobody asks for weights."""

    def cached(*sizes: int, **options: Any) -> Any:
        dtype = options.get("dtype", torch.bfloat16)
        return SimpleNamespace(
            is_cuda=True, dtype=dtype, shape=(2, 1, 9, *sizes), stride=lambda _: options.get("apart", 1)
        )

    latent, rope = cached(512), cached(64)
    with torch.no_grad():
        assert kernels.takes(latent, latent, latent, rope, MODULE)
        assert kernels.takes(latent, latent, latent, cached(0, apart=7), MODULE)
        for other in (cached(2048), cached(512, dtype=torch.float64), cached(512, apart=2)):
            assert not kernels.takes(other, other, other, rope, MODULE)
        wider = cached(512, dtype=torch.float32)
        assert not kernels.takes(wider, latent, latent, rope, MODULE), "autocast"
        assert not kernels.takes(latent, wider, latent, rope, MODULE), "autocast"
        for change in (
            {"softcap": 30.0},
            {"sinks": 1},
            {"config": SimpleNamespace(_attn_implementation="eager")},
        ):
            assert not kernels.takes(
                latent, latent, latent, rope, SimpleNamespace(**{**vars(MODULE), **change})
            )
    assert not kernels.takes(latent, latent, latent, rope, MODULE), "it has no gradient"
