"""KL(teacher || student) is torch's own on dense logits, zero against oneself, whatever the chunk."""

from pathlib import Path

import pytest
import torch

from kvfold.convert.errors import InvalidInput
from kvfold.eval.corpus import Text
from kvfold.eval.fidelity import common_vocabulary, summarise
from kvfold.eval.models import Loaded, load
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.scores import score
from kvfold.eval.windows import cut

OPTIONS = Options(device="cpu", window=32)


@pytest.fixture
def pair(mha: Path, other: Path) -> dict[str, Loaded]:
    return {"student": load(mha, OPTIONS), "teacher": load(other, OPTIONS)}


def test_a_model_against_itself_is_at_zero_distance(mha: Path, text: Text) -> None:
    result = evaluate(mha, mha, text, OPTIONS)
    assert result.fidelity is not None
    assert result.nll_difference is not None
    assert (result.fidelity.kl.mean, result.fidelity.kl_p99, result.fidelity.same_top1.mean) == (0.0, 0.0, 1.0)
    assert (result.nll_difference.mean, result.nll_difference.standard_error, result.cache_ratio) == (0.0, 0.0, 1.0)


def test_kl_and_agreement_are_those_of_dense_logits(pair: dict[str, Loaded], text: Text) -> None:
    ids_NW = cut(text, pair["student"], 32, OPTIONS).ids_NW
    with torch.no_grad():
        logits = {role: loaded.model(input_ids=ids_NW).logits[:, :-1].double() for role, loaded in pair.items()}
    student, teacher = (logits[role].log_softmax(-1) for role in ("student", "teacher"))
    dense = torch.nn.functional.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    scores = score(pair, ids_NW, batch_size=4)
    assert scores.kl_NT is not None
    assert scores.same_NT is not None
    torch.testing.assert_close(scores.kl_NT, dense, rtol=1e-4, atol=1e-5)
    assert dense.mean() > 0.1
    assert torch.equal(scores.same_NT, (student.argmax(-1) == teacher.argmax(-1)).double())
    assert 0 < scores.same_NT.mean() < 1


@pytest.mark.parametrize("chunk", [1, 50, 10_000])
def test_the_chunk_size_changes_no_number(pair: dict[str, Loaded], text: Text, chunk: int) -> None:
    ids_NW = cut(text, pair["student"], 32, OPTIONS).ids_NW
    expected, found = score(pair, ids_NW, batch_size=4), score(pair, ids_NW, batch_size=4, chunk=chunk)
    for ours, theirs in zip([*found.nll.values(), found.kl_NT], [*expected.nll.values(), expected.kl_NT], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_summary_has_the_quantiles_of_tokens_and_the_errors_of_windows() -> None:
    kl_NT = torch.arange(1, 201, dtype=torch.float64).view(2, 100)
    same_NT = torch.stack([torch.ones(100), torch.zeros(100)]).double()
    found = summarise(kl_NT, same_NT)
    assert (found.kl.mean, found.kl.standard_error) == (100.5, 50.0)
    assert (found.kl_median, found.kl_p99) == (100.0, 198.0)
    assert (found.same_top1.mean, found.same_top1.standard_error) == (0.5, 0.5)


def test_padded_vocabularies_are_compared_over_what_both_have() -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    short, long = logits[:, :8].log_softmax(-1), logits.log_softmax(-1)
    ours, theirs = common_vocabulary(short, long)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours, short)


def test_logits_that_are_not_finite_name_the_model_and_the_window(pair: dict[str, Loaded], text: Text) -> None:
    ids_NW = cut(text, pair["student"], 32, OPTIONS).ids_NW
    ids_NW[5, 20] = 257  # stands nowhere else
    pair["teacher"].model.get_input_embeddings().weight.data[257] = torch.nan
    with pytest.raises(InvalidInput, match=r"the teacher, .*, gives logits that are not finite in window 5"):
        score(pair, ids_NW, batch_size=4)


def test_a_model_that_does_more_to_its_logits_is_not_scored(pair: dict[str, Loaded], text: Text) -> None:
    ids_NW = cut(text, pair["student"], 32, OPTIONS).ids_NW
    model = pair["student"].model
    plain = model.forward

    def capped(**inputs: torch.Tensor) -> object:
        output = plain(**inputs)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output

    model.forward = capped
    with pytest.raises(InvalidInput, match=r"\(LlamaForCausalLM\) scales or caps its logits .* does not score yet"):
        score(pair, ids_NW, batch_size=4)
