"""A latent whose basis suits an RMSNorm: the fit, the fold into weights, and outputs that hold it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfold.convert.algebra.attention import LatentAttention
from kvfold.convert.algebra.forward import attend
from kvfold.convert.formats.stock import NORM_WEIGHT
from kvfold.convert.methods.latent_norm import (
    LatentTokens,
    feature_shares,
    in_level_basis,
    length_weights,
    level_basis,
    with_latent_norm,
    with_least_parts,
    with_query_norm,
)
from kvfold.convert.methods.length_form import FLOOR, fit_form, fit_root, raised_root
from kvfold.convert.methods.refinement import LayerSample
from kvfold.engines.rules.engine_rules import lint

from ...support.folds import convert as run
from ...support.layers import drawn
from ...support.tiny import make

FOLD = ("--to", "mla", "--container", "stock", "--sequences", "6", "--length", "48", "--refine", "3")


def normed(tokens: int, width: int, *, seed: int = 0, least: float = 0.2) -> tuple[Tensor, Tensor]:
    """Tokens of unequal features behind an RMSNorm, and its weight."""
    raw = drawn(tokens, width, seed=seed) * torch.linspace(least, 3, width, dtype=torch.float64)
    weight = drawn(width, seed=9).abs() + 0.3
    return raw / raw.square().mean(-1, keepdim=True).sqrt() * weight, weight


def layer(
    width: int = 12, rank: int = 5, heads: int = 2, head: int = 4, *, bias: bool = False
) -> LatentAttention:
    shapes = {
        "q_nope_NPA": (heads, head, width), "q_rope_NRA": (heads, 2, width), "down_CD": (rank, width),
        "k_up_NPC": (heads, head, rank), "v_up_NHC": (heads, head, rank), "k_rope_RD": (2, width),
        "o_DNH": (width, heads, head),
    }  # fmt: skip
    shapes |= {"q_nope_NP": (heads, head), "q_rope_NR": (heads, 2)} if bias else {}
    weights = {name: drawn(*shape, seed=n) / 3 for n, (name, shape) in enumerate(shapes.items())}
    return LatentAttention(**weights, scale=0.5)


def convert(source: Path, out: Path, *arguments: str) -> str:
    result = run(source, *arguments, out=out, code=0)
    return result.output


def test_shares_of_features_undo_the_weight_of_a_norm() -> None:
    input_XD, weight_D = normed(400, 10)
    torch.testing.assert_close(feature_shares(input_XD), 1 / (10 * weight_D.square()), rtol=1e-5, atol=0)


def test_the_form_is_the_least_squares_solution() -> None:
    latent_XC = drawn(300, 4) * torch.tensor([1.0, 0.9, 1.2, 0.8])
    pairs = torch.tensor([(i, j) for i in range(4) for j in range(i, 4)])
    products_XP = latent_XC[:, pairs[:, 0]] * latent_XC[:, pairs[:, 1]]
    weight_X = drawn(300, seed=4).square()
    root_X1 = weight_X.sqrt()[:, None]
    solution_P = torch.linalg.lstsq(root_X1 * products_XP, root_X1).solution[:, 0]
    wanted_CC = torch.zeros(4, 4, dtype=torch.float64)
    wanted_CC[pairs[:, 0], pairs[:, 1]] += solution_P / 2
    wanted_CC[pairs[:, 1], pairs[:, 0]] += solution_P / 2
    start_CC = torch.eye(4, dtype=torch.float64) / 4
    found_CC = fit_form(latent_XC, latent_XC, weight_X, weight_X, start_CC)
    torch.testing.assert_close(found_CC, wanted_CC, rtol=1e-3, atol=1e-3)


def test_the_search_ends_where_held_back_tokens_stop_gaining() -> None:
    few_XC, held_XC = drawn(30, 8), drawn(500, 8, seed=1)
    start_CC = torch.eye(8, dtype=torch.float64) / 8

    def error(form_CC: Tensor) -> float:
        return float((((held_XC @ form_CC) * held_XC).sum(-1) - 1).square().mean())

    few_X, held_X = (torch.ones(count, dtype=torch.float64) for count in (30, 500))
    overfitted = error(fit_form(few_XC, few_XC, few_X, few_X, start_CC))
    assert error(fit_form(few_XC, held_XC, few_X, held_X, start_CC)) <= error(start_CC) < overfitted


def test_a_root_is_better_than_the_positive_part_of_a_form() -> None:
    """The least squares solution has negative eigenvalues here, which no length has."""
    raw_XC = drawn(600, 6).abs() ** 2 - 0.4
    latent_XC = raw_XC / raw_XC.square().mean(0).sqrt()
    weight_X = torch.ones(600, dtype=torch.float64)
    form_CC = fit_form(latent_XC, latent_XC, weight_X, weight_X, torch.eye(6, dtype=torch.float64) / 6)
    value_C, basis_CC = torch.linalg.eigh(form_CC)
    assert value_C[0] < 0
    floored_CC = (basis_CC * value_C.clamp(min=FLOOR / 6).sqrt()) @ basis_CC.mT
    root_CC = fit_root(latent_XC, latent_XC, weight_X, weight_X, form_CC)
    assert torch.linalg.eigvalsh(root_CC.mT @ root_CC)[0] > FLOOR / 6 * (1 - 1e-9)
    errors = [(1 / (latent_XC @ a.mT).norm(dim=-1) - 1).square().mean() for a in (root_CC, floored_CC)]
    assert errors[0] < 0.8 * errors[1]


def variation(latent_XC: Tensor) -> float:
    """Return the coefficient of variation of the tokens' lengths, which a norm would remove."""
    length_X = latent_XC.norm(dim=-1)
    return float(length_X.std() / length_X.mean())


def test_a_latent_that_holds_the_whole_input_gets_equal_lengths() -> None:
    input_XD, _ = normed(500, 10, least=1.0)
    down_CD = drawn(10, 10, seed=3)
    basis_CC = level_basis(LatentTokens.of(input_XD[:400], input_XD[400:]), down_CD)
    assert variation(input_XD @ down_CD.mT) > 0.1
    assert variation(input_XD @ (basis_CC @ down_CD).mT) < 1e-4


def test_a_part_of_the_input_gets_nearly_equal_lengths() -> None:
    input_XD, _ = normed(2000, 24)
    energy_D, basis_DD = torch.linalg.eigh(input_XD.mT @ input_XD / 2000)
    down_CD = (basis_DD / energy_D.sqrt()).mT[12:]
    basis_CC = level_basis(LatentTokens.of(input_XD[:1500], input_XD[1500:]), down_CD)
    before, after = variation(input_XD[1500:] @ down_CD.mT), (input_XD[1500:] @ (basis_CC @ down_CD).mT)
    assert variation(after) < 0.85 * before


def test_weights_of_lengths_are_second_derivatives() -> None:
    attention, input_BTD = layer(), drawn(2, 6, 12, seed=11)
    root_DD, slots_S = drawn(12, 12, seed=12) / 4, torch.tensor([0.3], dtype=torch.float64)
    sample = LayerSample(input_BTD=input_BTD, output_BTD=input_BTD, fisher_DD=root_DD @ root_DD.mT)
    found_BT = length_weights(attention, slots_S, sample, draws=400)
    gain_BT = torch.ones(2, 6, dtype=torch.float64)
    slopes = torch.autograd.functional.jacobian(
        lambda gain: attend(attention, input_BTD, slots_S, gain_BT=gain), gain_BT
    )
    assert isinstance(slopes, Tensor)
    wanted_BT = (slopes.movedim(2, -1) @ root_DD).square().sum((0, 1, 4))
    torch.testing.assert_close(found_BT, wanted_BT, rtol=0.3, atol=0)


@pytest.mark.parametrize("widths", [(5, 2, 4, 4), (16, 8, 6, 7)])
def test_the_basis_folds_into_the_weights(widths: tuple[int, int, int, int]) -> None:
    input_XD, _ = normed(300, 12)
    levelled = with_latent_norm(layer(), LatentTokens.of(input_XD[:250], input_XD[250:]))
    folded = in_level_basis(levelled, input_XD[None], 0.2).widened(*widths, [0])
    input_BTD = input_XD[:20][None]
    slots_S = torch.tensor([0.3, *[0.0] * (widths[1] // 2 - 1)], dtype=torch.float64)
    wanted_BTD = attend(levelled, input_BTD, slots_S[:1])
    torch.testing.assert_close(attend(folded, input_BTD, slots_S), wanted_BTD, rtol=1e-3, atol=1e-3)
    assert set(folded.latent_norm_C.tolist()) <= {2.0**n for n in range(-12, 13)}
    down_CD = in_level_basis(levelled, input_XD[None], 0.2).down_CD
    assert float(down_CD.square().mean().sqrt()) == pytest.approx(0.2)


def test_a_direction_that_left_the_length_gets_a_part_of_it() -> None:
    """As refinement leaves one: then a row is tiny, and a weight of the norm is hundreds of times another."""
    input_XD, _ = normed(400, 12)
    levelled = with_latent_norm(layer(), LatentTokens.of(input_XD[:250], input_XD[250:]))
    assert levelled.level_CC is not None
    left, size, right = torch.linalg.svd(levelled.level_CC)
    size[-1] = size[0] * 1e-4
    without = dataclasses.replace(levelled, level_CC=(left * size) @ right)
    whole = with_least_parts(without, input_XD.unflatten(0, (4, 100)), 0.05)

    def spread(one: LatentAttention) -> float:
        folded = in_level_basis(one, input_XD[None], 0.2)
        return float(folded.latent_norm_C.max() / folded.latent_norm_C.min())

    def length_X(one: LatentAttention) -> Tensor:
        return (input_XD @ one.down_CD.mT @ one.level_CC.mT).norm(dim=-1)

    assert spread(without) > 500
    assert spread(whole) < spread(without) / 10
    assert float(length_X(whole).square().mean()) == pytest.approx(float(length_X(without).square().mean()))
    assert float((length_X(whole) / length_X(without) - 1).abs().median()) < 0.05
    again = with_least_parts(whole, input_XD.unflatten(0, (4, 100)), 0.01)  # nothing is below
    torch.testing.assert_close(length_X(again), length_X(whole))


def test_directions_without_tokens_are_left_alone() -> None:
    """A latent that is wider than its input: no direction lacks a part, so that no length changes."""
    latent_XC = drawn(300, 6) @ drawn(6, 16, seed=1)
    moment_CC = latent_XC.mT @ latent_XC / len(latent_XC)
    root_CC = drawn(16, 16, seed=2)
    kept_CC = raised_root(root_CC, moment_CC, 1e-6)
    torch.testing.assert_close((latent_XC @ kept_CC.mT).norm(dim=-1), (latent_XC @ root_CC.mT).norm(dim=-1))
    raised_CC = raised_root(root_CC, moment_CC, 0.2)
    assert torch.linalg.cond(raised_CC) < 1e3
    sizes = [float((latent_XC @ one.mT).square().sum()) for one in (raised_CC, root_CC)]
    assert sizes[0] == pytest.approx(sizes[1])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_queries_pass_a_norm(bias: bool, compressed: bool) -> None:
    input_XD, _ = normed(300, 12, least=1.0)
    plain = layer(bias=bias)
    if compressed:  # to no fewer numbers, so that the lengths can be made equal
        back_AD = torch.linalg.inv(rows_AD := drawn(12, 12, seed=8))
        changed = {"q_nope_NPA": plain.q_nope_NPA @ back_AD, "q_rope_NRA": plain.q_rope_NRA @ back_AD}
        plain = LatentAttention(**{**vars(plain), **changed, "q_down_AD": rows_AD})
    made = with_query_norm(plain, LatentTokens.of(input_XD[:250], input_XD[250:]), 0.05, biased=bias)
    assert made.q_nope_NP is made.q_rope_NR is None
    slots_S = torch.tensor([0.3], dtype=torch.float64)
    wanted_BTD = attend(plain, input_XD[:20][None], slots_S)
    torch.testing.assert_close(attend(made, input_XD[:20][None], slots_S), wanted_BTD, rtol=1e-3, atol=1e-3)


def test_queries_compressed_in_name_only_pass_a_diagonal() -> None:
    """Rounded, a diagonal loses next to nothing; any other basis of the same width loses what queries do."""
    input_XD, _ = normed(300, 12)
    plain = dataclasses.replace(layer(), q_down_AD=torch.eye(12, dtype=torch.float64))
    made = with_query_norm(plain, LatentTokens.of(input_XD[:250], input_XD[250:]), 0.05, biased=False)
    assert torch.equal(made.q_down_AD, made.q_down_AD.diagonal().diag())


@pytest.mark.usefixtures("warm_probe")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_output_with_fitted_norms(tmp_path: Path, family: str) -> None:
    source = make(tmp_path / "source", family, hidden_size=64, num_key_value_heads=4)
    fitted = ("--kv-budget", "50%", "--latent-norm", "fitted", "--verify", "full")
    convert(source, tmp_path / "out", *FOLD, *fitted)
    assert json.loads((tmp_path / "out" / "kvfold.json").read_text())["latent_norm"] == "fitted"
    tensors, theirs = (load_file(place / "model.safetensors") for place in (tmp_path / "out", source))
    for name, tensor in tensors.items():
        if name.endswith("_a_layernorm.weight"):
            assert float(tensor.max()) < NORM_WEIGHT / 8
        elif any(part in name for part in ("kv_a_proj", "kv_b_proj", "q_a_proj.weight", "q_b_proj")):
            size = theirs["model.layers.0.self_attn.v_proj.weight"].square().mean().sqrt()
            assert size / 10 < tensor.square().mean().sqrt() < size * 10, name
    assert not [one for one in lint(tmp_path / "out", ["transformers"]) if "linearised" in one.sentence]
    assert not [
        one
        for one in lint(tmp_path / "out", ["vllm", "sglang", "llama.cpp"])
        if "rms_norm_eps" in one.sentence
    ]
    assert "`target_modules`" in (tmp_path / "out" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float16)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        exact, rounded = (one(tokens).logits.float().log_softmax(-1) for one in (model, half))
    assert (rounded - exact).abs().mean() < 0.01


def test_lengths_for_rounding_leave_closed_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is chosen before refinement, whose record still says what the closed form loses."""
    source = make(tmp_path / "source", hidden_size=64, num_key_value_heads=4)
    fold = ("--kv-budget", "25%", "--latent-norm", "fitted")

    def folded(name: str, *refine: str) -> tuple[list[float], dict[str, Tensor]]:
        convert(source, tmp_path / name, *FOLD, *fold, *refine)
        record = json.loads((tmp_path / name / "kvfold.json").read_text())
        losses = [layer["measured"]["folded"] for layer in record["layers"]]
        return losses, load_file(tmp_path / name / "model.safetensors")

    refined, closed = folded("refined"), folded("closed", "--refine", "0")
    monkeypatch.setattr("kvfold.convert.layer.finish.rounded_root", lambda costs, *_: torch.eye(1))
    assert refined[0] == pytest.approx(closed[0])
    _, again = folded("again", "--refine", "0")
    assert all(torch.equal(tensor, again[name]) for name, tensor in closed[1].items())


def test_the_default_is_a_real_norm_and_a_linear_one_is_warned_of(tmp_path: Path) -> None:
    source = make(tmp_path / "source", dtype=torch.float16)
    for norm in ("auto", "linear"):
        said = convert(source, tmp_path / norm, *FOLD, "--kv-budget", "25%", "--latent-norm", norm)
        tensors = load_file(tmp_path / norm / "model.safetensors")
        is_linear = norm == "linear"
        record = json.loads((tmp_path / norm / "kvfold.json").read_text())
        assert record["latent_norm"] == ("linear" if is_linear else "fitted")
        assert {one.dtype for one in tensors.values()} == {torch.bfloat16 if is_linear else torch.float16}
        assert ("the latent's norm is linear" in said) == ("float16 cannot hold" in said) == is_linear
        weights = [tensor for name, tensor in tensors.items() if "kv_a_layernorm" in name]
        assert all(bool((one == NORM_WEIGHT).all()) == is_linear for one in weights)


@pytest.mark.parametrize(("arguments", "words"), [
    ("--to gqa --kv-heads 2 --latent-norm fitted", "applies only to latent attention"),
    ("--to mla --kv-budget 25% --container remote --latent-norm linear", "applies only to latent"),
    ("--to mla --rank full --dtype float16", "--rank full"),
    ("--to mla --kv-budget 25% --latent-norm linear --dtype float16",
     "has a scale that --dtype float16 cannot hold"),
    ("--to mla --kv-budget 25% --rope intact --latent-norm fitted", "applies only to latent attention with a norm"),
])  # fmt: skip
def test_a_norm_that_cannot_be_had(tmp_path: Path, arguments: str, words: str) -> None:
    assert words in run(make(tmp_path / "source"), *arguments.split(), code=2).output
    assert not list(tmp_path.glob("out*"))


def test_full_rank_keeps_a_linear_norm(tmp_path: Path) -> None:
    """It is the proof that nothing is lost, and a real norm would change the numbers."""
    source = make(tmp_path / "source")
    said = convert(source, tmp_path / "out", "--to", "mla", "--rank", "full")
    assert json.loads((tmp_path / "out" / "kvfold.json").read_text())["latent_norm"] == "linear"
    assert "the latent's norm is linear" in said


@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo"])
def test_weights_alone_fit_a_norm_to_inputs_of_one_length(tmp_path: Path, family: str) -> None:
    """Those are what an RMSNorm passes on. In a class that has none, it costs little more than a linear one."""
    source, losses = make(tmp_path / "source", family, hidden_size=64, num_key_value_heads=4), {}
    tokens = torch.arange(2, 42)[None]

    def logits(place: Path) -> Tensor:
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
            return torch.as_tensor(model(tokens).logits)

    for norm in ("auto", "linear"):
        by_weights = ("--to", "mla", "--kv-budget", "50%", "--calibration", "none", "--latent-norm", norm)
        convert(source, tmp_path / norm, *by_weights, "--container", "stock")
        losses[norm] = float((logits(tmp_path / norm) - logits(source)).square().mean())
    assert json.loads((tmp_path / "auto" / "kvfold.json").read_text())["latent_norm"] == "fitted"
    assert losses["auto"] < 1.3 * losses["linear"]
