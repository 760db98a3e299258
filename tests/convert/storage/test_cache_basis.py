"""Coordinates of a cache for few bits: the same function, and less lost to rounding."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra.attention import Attention, IntactAttention, LatentAttention
from kvfold.convert.algebra.forward import attend
from kvfold.convert.algebra.metric import weights_only
from kvfold.convert.algebra.target import LatentTarget
from kvfold.convert.methods import latent as factor
from kvfold.convert.methods import refinement
from kvfold.convert.methods.intact import to_intact
from kvfold.convert.methods.latent_norm import LatentTokens, in_level_basis, with_latent_norm
from kvfold.convert.methods.refinement import LayerSample, measure, refine
from kvfold.convert.storage.cache_basis import SIZE, caches_of, fit_basis, in_basis
from kvfold.convert.storage.cache_fit import FLOOR, LARGEST, SHARE, rounding_cost
from kvfold.convert.storage.cache_moments import sampled_moments, weights_moments
from kvfold.core.cache_dtypes import cache_dtype

from ...support.folds import convert as run
from ...support.layers import FREQUENCIES_F, OWN, H, layer
from ...support.refined_layers import normed, sample, teacher
from ...support.tiny import make

INT4 = cache_dtype("int4")
FOLD = ("--to", "mla", "--kv-budget", "50%", "--sequences", "6", "--length", "32", "--refine", "3")


def unequal(biases: bool = False) -> Attention:
    """Heads that write their pairs and values in very unlike sizes, which whatever reads them takes back."""
    a = layer(heads=4, key_heads=2, biases=biases)
    size_F, size_H = (torch.logspace(-1, 1, width, dtype=torch.float64) for width in (H // 2, H))
    pairs_H = size_F.repeat(2)
    return replace(
        a,
        k_KHD=a.k_KHD * pairs_H[:, None],
        q_NHD=a.q_NHD / pairs_H[:, None],
        v_KHD=a.v_KHD * size_H[:, None],
        o_DNH=a.o_DNH / size_H,
    )


def latent() -> LatentAttention:
    target = LatentTarget(kv_lora_rank=12, qk_rope_head_dim=H)
    return factor.to_mla(teacher(), target, FREQUENCIES_F, OWN, weights_only(teacher(), 64))


def intact() -> IntactAttention:
    target = LatentTarget(kv_lora_rank=12, qk_rope_head_dim=0, slots="none", rope="intact")
    return to_intact(teacher(), target, weights_only(teacher(), 64))


def taken(a: Attention | None = None) -> LayerSample:
    found = sample(normed(8, 16))
    if a is None:
        return found
    return replace(found, output_BTD=attend(a, found.input_BTD[:1], FREQUENCIES_F))


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("folded", [unequal(), unequal(biases=True), latent(), intact()])
def test_other_coordinates_are_the_same_function(
    folded: Attention | LatentAttention | IntactAttention, calibrated: bool
) -> None:
    x_BTD = normed(2, 11, seed=3)
    moments = sampled_moments(folded, FREQUENCIES_F, taken()) if calibrated else weights_moments(folded)
    basis = fit_basis(folded, FREQUENCIES_F, moments, INT4)
    written = in_basis(folded, basis)
    assert basis.norm is None
    wanted_BTD = attend(folded, x_BTD, FREQUENCIES_F)
    torch.testing.assert_close(attend(written, x_BTD, FREQUENCIES_F), wanted_BTD)
    seen: list[Tensor] = []

    def watched(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows

    attend(written, taken().input_BTD, FREQUENCIES_F, cache=watched)
    for rows in seen:
        assert float(rows.square().mean().sqrt()) == pytest.approx(SIZE, rel=0.2 if calibrated else 1.0)


def test_a_normed_latent_is_turned_before_its_norm_and_scaled_after_it() -> None:
    x_BTD, found = normed(2, 11, seed=3), taken()
    levelled = with_latent_norm(latent(), LatentTokens.of(*(normed(1, 200, seed=n)[0] for n in (4, 5))))
    moments = sampled_moments(levelled, FREQUENCIES_F, found)
    basis = fit_basis(levelled, FREQUENCIES_F, moments, INT4)
    eye_CC = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(basis.norm.turn_CC @ basis.norm.turn_CC.mT, eye_CC, atol=1e-6, rtol=0)
    final = in_level_basis(in_basis(levelled, basis), x_BTD, 0.3, basis.norm)
    wanted_BTD = attend(levelled, x_BTD, FREQUENCIES_F)
    torch.testing.assert_close(attend(final, x_BTD, FREQUENCIES_F), wanted_BTD, atol=1e-5, rtol=1e-5)
    # What refinement sees before the norm is in place is what the written layer stores.
    before_BTD = attend(levelled, x_BTD, FREQUENCIES_F, cache=caches_of(INT4, basis))
    after_BTD = attend(final, x_BTD, FREQUENCIES_F, cache=INT4.stored)
    torch.testing.assert_close(before_BTD, after_BTD, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["int4", "nvfp4"])
def test_prepared_layers_lose_less_when_their_cache_is_rounded(name: str) -> None:
    dtype, a = cache_dtype(name), unequal()
    found = taken(a)
    plain = measure(a, FREQUENCIES_F, a, FREQUENCIES_F, found, dtype.stored)
    written = in_basis(a, fit_basis(a, FREQUENCIES_F, sampled_moments(a, FREQUENCIES_F, found), dtype))
    prepared = measure(written, FREQUENCIES_F, a, FREQUENCIES_F, found, dtype.stored)
    assert measure(written, FREQUENCIES_F, a, FREQUENCIES_F, found) < 1e-6 * plain
    assert prepared < 0.7 * plain


def test_refinement_sees_what_rounding_does() -> None:
    a = unequal()
    found = replace(taken(a), input_BTD=normed(32, 16))
    fitted = refine(a, FREQUENCIES_F, a, FREQUENCIES_F, found, steps=30, cache=INT4.passed)
    assert measure(a, FREQUENCIES_F, a, FREQUENCIES_F, found) == 0
    assert measure(a, FREQUENCIES_F, a, FREQUENCIES_F, found, INT4.stored) == pytest.approx(fitted.folded)
    assert fitted.refined < 0.99 * fitted.folded
    after = measure(fitted.layer, FREQUENCIES_F, a, FREQUENCIES_F, found, INT4.stored)
    assert after == pytest.approx(fitted.refined, rel=0.01)


def test_layers_may_be_refined_in_other_coordinates_than_are_written() -> None:
    found, folded = sample(normed(16, 16)), latent()
    basis = fit_basis(folded, FREQUENCIES_F, sampled_moments(folded, FREQUENCIES_F, found), INT4)
    source = teacher(), FREQUENCIES_F, found
    through = measure(folded, FREQUENCIES_F, *source, caches_of(INT4, basis))
    assert through == pytest.approx(
        measure(in_basis(folded, basis), FREQUENCIES_F, *source, INT4.stored), rel=0.01
    )


def test_the_cost_of_rounding_is_by_the_largest_of_a_group_or_the_number_itself() -> None:
    rows_XW, cost_W = torch.arange(1.0, 41).view(2, 20), torch.ones(20)
    assert float(rounding_cost(rows_XW, cost_W, INT4)) == pytest.approx((20 * 20**2 + 20 * 40**2) / 2)
    largest = torch.tensor([[16.0] * 16 + [20] * 4, [36.0] * 16 + [40] * 4])  # of groups of 16
    share_XW = torch.where(rows_XW < largest, SHARE, LARGEST)
    nvfp4 = torch.maximum(rows_XW**2 * share_XW, largest**2 * FLOOR).sum() / 2
    assert float(rounding_cost(rows_XW, cost_W, cache_dtype("nvfp4"))) == pytest.approx(float(nvfp4))
    assert float(rounding_cost(rows_XW, cost_W, cache_dtype("fp8_e4m3"))) == rows_XW.square().sum() / 2


def _measured(found: dict[str, dict[str, float]]) -> dict[str, float]:
    return found["measured"]


def convert(source: Path, out: Path, *options: str) -> str:
    result = run(source, *options, out=out, code=0)
    return result.output


def test_a_fold_records_its_format_and_is_made_again_to_the_same_bits(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "llama")
    for name, options in (("one", ("--jobs", "1")), ("two", ("--jobs", "2"))):
        output = convert(source, tmp_path / name, *FOLD, "--cache-dtype", "int4", *options)
    convert(source, tmp_path / "plain", *FOLD)
    one, two, plain = (
        {file.name: file.read_bytes() for file in (tmp_path / name).glob("*.safetensors")}
        for name in ("one", "two", "plain")
    )
    assert one == two != plain
    record, other = (json.loads((tmp_path / name / "kvfold.json").read_text()) for name in ("one", "plain"))
    assert record["request"]["cache_dtype"] == "int4"
    assert "--cache-dtype int4" in record["command"]
    assert "cache_dtype" not in other["request"]
    sums = {
        name: sum(found["measured"][name] for found in record["layers"])
        for name in ("refined", "stored", "unprepared")
    }
    assert record["predicted_loss"] == pytest.approx(sums["refined"])
    wanted = {"name": "int4", "predicted_loss": sums["stored"], "unprepared": sums["unprepared"]}
    assert record["cache_dtype"] == pytest.approx(wanted)
    assert "cache_dtype" not in other
    assert all(loss["stored"] <= loss["unprepared"] for loss in map(_measured, record["layers"]))
    said = f"{sums['stored']:.4f} with its cache in int4 ({sums['unprepared']:.4f} unprepared)"
    assert said in output
    assert "prepared for a cache in int4" in (tmp_path / "one" / "README.md").read_text()


@pytest.mark.parametrize("options", [
    ("--to", "gqa", "--kv-heads", "2", "--calibration", "none"),
    ("--to", "mla", "--kv-budget", "50%", "--calibration", "none"),
    ("--to", "mla", "--kv-budget", "50%", "--rope", "intact", "--refine", "0", "--sequences", "2"),
])  # fmt: skip
def test_every_form_and_weights_alone_are_prepared(tmp_path: Path, options: tuple[str, ...]) -> None:
    source = make(tmp_path / "source", "llama")
    convert(source, tmp_path / "out", *options, "--cache-dtype", "nvfp4", "--verify", "lint")
    assert json.loads((tmp_path / "out" / "kvfold.json").read_text())["request"]["cache_dtype"] == "nvfp4"


def test_layers_that_cannot_be_prepared_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source", "llama")
    monkeypatch.setattr(refinement, "AGREEMENT", -1.0)  # as for attention that `attend` does not compute
    options = ("--cache-dtype", "int4", "--verify", "lint")
    said = "layers 0, 1 are not prepared for a cache in int4: their norm is fitted"
    assert said in convert(source, tmp_path / "out", *FOLD, "--latent-norm", "fitted", *options)
    record = json.loads((tmp_path / "out" / "kvfold.json").read_text())
    assert record["cache_dtype"] == {"name": "int4"}
    assert sum(notice.startswith(said) for notice in record["notices"]) == 1
    assert said not in convert(source, tmp_path / "linear", *FOLD, "--latent-norm", "linear", *options)


@pytest.mark.parametrize(("options", "said"), [
    (("--to", "mla", "--rank", "full"), "does not apply where everything is kept"),
    (("--to", "gqa", "--kv-heads", "2", "--method", "mean"), "does not apply to --method mean"),
    (("--to", "gqa", "--kv-heads", "2", "--engine", "mlx"), "does not suit --engine mlx: it does not store"),
])  # fmt: skip
def test_proofs_published_rules_and_engines_without_the_format_are_refused(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    source = make(tmp_path / "source", "llama")
    assert said in run(source, *options, "--cache-dtype", "int4", code=2).output
    assert not (tmp_path / "out").exists()
