"""KL(teacher || student) is torch's own on dense logits, zero against oneself, whatever the chunk."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvfold.core.errors import InvalidInput
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.scores import Live, Scores, common_vocabulary, gather, score
from kvfold.eval.suites.fidelity import rows, summarise
from kvfold.eval.windows import TextWindows, cut
from kvfold.models.causal_lm import Loaded, load
from kvfold.texts.corpus import Text

OPTIONS = Options(device="cpu", window=32)


@pytest.fixture
def pair(mha: Path, other: Path) -> dict[str, Loaded]:
    return {"student": load(mha, OPTIONS), "teacher": load(other, OPTIONS)}


@pytest.fixture
def windows(pair: dict[str, Loaded], text: Text) -> TextWindows:
    return cut(text, pair["student"], 32, OPTIONS)


def scores_of(pair: dict[str, Loaded], windows: TextWindows, chunk: int | None = None) -> Scores:
    sources = {role: Live(loaded, windows) for role, loaded in pair.items()}
    return gather(windows, score(sources, windows, 4, chunk=chunk))


def dense(pair: dict[str, Loaded], windows: TextWindows) -> dict[str, Tensor]:
    """Log probabilities (N, T, V) of each model's own logits, float64."""
    with torch.no_grad():
        logits = {role: loaded.model(input_ids=windows.ids_NW).logits for role, loaded in pair.items()}
    return {role: value[:, :-1].double().log_softmax(-1) for role, value in logits.items()}


def test_a_model_against_itself_is_at_zero_distance(mha: Path, text: Text) -> None:
    result = evaluate(mha, mha, text, OPTIONS)
    found, difference = result.fidelity, result.ppl.difference
    assert (found.kl.mean, found.kl_max, found.same_top1.mean, found.delta_p_rms.mean) == (0.0, 0.0, 1.0, 0.0)
    assert found.nll_correlation.mean == pytest.approx(1)
    assert (difference.mean, difference.standard_error, result.cache.ratio) == (0.0, 0.0, 1.0)


def test_the_block_is_what_numpy_makes_of_dense_logits(pair: dict[str, Loaded], windows: TextWindows) -> None:
    logp = dense(pair, windows)
    wanted = windows.ids_NW[:, 1:, None]
    ours, theirs = (logp[role].gather(-1, wanted)[..., 0].numpy() for role in ("student", "teacher"))
    kl = (logp["teacher"].exp() * (logp["teacher"] - logp["student"])).sum(-1).numpy()
    delta = np.exp(ours) - np.exp(theirs)
    found = summarise(scores_of(pair, windows))
    near = {"rel": 1e-4, "abs": 1e-6}
    assert found.kl.mean == pytest.approx(kl.mean(), **near)
    assert found.kl.standard_error == pytest.approx(kl.mean(1).std(ddof=1) / math.sqrt(len(kl)), **near)
    assert found.kl_max == pytest.approx(kl.max(), **near)
    same = (logp["student"].argmax(-1) == logp["teacher"].argmax(-1)).double().mean()
    assert 0 < found.same_top1.mean < 1
    assert found.same_top1.mean == pytest.approx(float(same))
    for name, found_there, values in (
        ("kl", found.kl_percentiles, kl),
        ("Δp", found.delta_p_percentiles, delta),
    ):
        for key, value in found_there.items():
            percentile = float(key[1:].replace("_", "."))
            assert value.mean == pytest.approx(np.percentile(values, percentile), **near), (name, key)
    assert found.delta_p.mean == pytest.approx(delta.mean(), **near)
    assert found.delta_p_rms.mean == pytest.approx(math.sqrt((delta**2).mean()), **near)
    square_error = (delta**2).mean(1).std(ddof=1) / math.sqrt(len(delta))
    assert found.delta_p_rms.standard_error == pytest.approx(
        square_error / (2 * found.delta_p_rms.mean), **near
    )
    assert found.nll_correlation.mean == pytest.approx(
        np.corrcoef(ours.ravel(), theirs.ravel())[0, 1], **near
    )
    assert [(bucket.first, bucket.last) for bucket in found.kl_by_position] == [
        (1, 1), (2, 3), (4, 7), (8, 15), (16, 31),
    ]  # fmt: skip
    for bucket in found.kl_by_position:
        part = kl[:, bucket.first - 1 : bucket.last]
        assert bucket.kl.mean == pytest.approx(part.mean(), **near)
        assert bucket.kl.standard_error == pytest.approx(
            part.mean(1).std(ddof=1) / math.sqrt(len(part)), **near
        )


def test_errors_of_percentiles_and_correlation_come_from_drawing_windows_again(
    pair: dict[str, Loaded], windows: TextWindows
) -> None:
    scores = scores_of(pair, windows)
    assert scores.kl_S is not None
    shape = windows.scored_NT.shape
    kl, ours, theirs = (
        value.view(shape).numpy() for value in (scores.kl_S, scores.nll["student"], scores.nll["teacher"])
    )
    draw = np.random.default_rng(5)
    drawn = [draw.integers(len(kl), size=len(kl)) for _ in range(2000)]
    found = summarise(scores)
    medians = [np.median(kl[index]) for index in drawn]
    correlations = [np.corrcoef(ours[index].ravel(), theirs[index].ravel())[0, 1] for index in drawn]
    assert found.nll_correlation is not None
    for value, again in ((found.kl_percentiles["p50"], medians), (found.nll_correlation, correlations)):
        assert value.standard_error == pytest.approx(np.std(again), rel=0.15)
        assert (value.low, value.high) == pytest.approx(
            tuple(np.percentile(again, [2.5, 97.5])), abs=0.5 * np.std(again)
        )


@pytest.mark.parametrize("chunk", [1, 50, 10_000])
def test_the_chunk_size_changes_no_number(pair: dict[str, Loaded], windows: TextWindows, chunk: int) -> None:
    expected, found = scores_of(pair, windows), scores_of(pair, windows, chunk)
    for ours, theirs in zip(
        [*found.nll.values(), found.kl_S], [*expected.nll.values(), expected.kl_S], strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_one_window_has_numbers_and_no_errors() -> None:
    value_S = torch.arange(1.0, 101.0, dtype=torch.float64)
    zeros = torch.zeros(100, dtype=torch.int64)
    nll = {"student": value_S, "teacher": value_S.flip(0)}
    found = summarise(Scores(zeros, torch.arange(1, 101), nll, value_S, torch.ones(100).double()))
    assert (found.kl.mean, found.kl.standard_error, found.kl.low) == (50.5, None, None)
    assert (found.kl_percentiles["p50"].mean, found.kl_percentiles["p50"].standard_error) == (50.5, None)
    assert (found.nll_correlation.mean, found.nll_correlation.standard_error) == (pytest.approx(-1), None)


def test_a_constant_loss_has_no_correlation() -> None:
    nll = {"student": torch.ones(6).double(), "teacher": torch.arange(6).double()}
    window_S = torch.tensor([0, 0, 0, 1, 1, 1])
    found = summarise(Scores(window_S, torch.tensor([1, 2, 3] * 2), nll, nll["teacher"], nll["student"]))
    assert found.nll_correlation is None
    assert ["correlation of log probabilities", "undefined"] in rows(found, ("student",))


def test_padded_vocabularies_are_compared_over_what_both_have() -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    short, long = logits[:, :8].log_softmax(-1), logits.log_softmax(-1)
    ours, theirs = common_vocabulary(short, long)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours, short)


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_logits_that_are_not_finite_name_the_model_the_window_and_the_module(
    pair: dict[str, Loaded], windows: TextWindows, role: str
) -> None:
    windows.ids_NW[5, 20] = 257  # stands nowhere else
    pair[role].model.get_input_embeddings().weight.data[257] = torch.nan
    sentence = (
        rf"the {role}, .*, gives logits that are not finite in window 5; .* that of model.embed_tokens$"
    )
    with pytest.raises(InvalidInput, match=sentence):
        scores_of(pair, windows)


def test_the_layer_in_which_it_overflows_is_named(pair: dict[str, Loaded], windows: TextWindows) -> None:
    pair["student"].model.model.layers[1].mlp.down_proj.weight.data.fill_(torch.inf)
    with pytest.raises(
        InvalidInput, match=r"not finite in window 0; .* of model\.layers\.1\.mlp\.down_proj$"
    ):
        scores_of(pair, windows)


def test_a_model_that_alters_its_logits_is_not_scored(pair: dict[str, Loaded], windows: TextWindows) -> None:
    model = pair["student"].model
    plain = model.forward

    def capped(**inputs: torch.Tensor) -> object:
        output = plain(**inputs)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output

    model.forward = capped
    with pytest.raises(InvalidInput, match=r"\(LlamaForCausalLM\) scales or .* logits .* does not score yet"):
        scores_of(pair, windows)
