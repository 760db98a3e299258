"""Perplexity is exp of the mean loss that the models report themselves; differences are paired; shares follow their formula."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.eval.corpus import Text
from kvfold.eval.options import Options
from kvfold.eval.perplexity import Share, estimate, paired_difference, recovered_share
from kvfold.eval.run import evaluate

from .conftest import Make

OPTIONS = Options(device="cpu", window=32)


@pytest.mark.parametrize("bos", [True, False])
def test_perplexity_is_that_of_a_plain_loop_over_model_loss(mha: Path, text: Text, bos: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(mha)
    model = AutoModelForCausalLM.from_pretrained(mha, dtype=torch.float32).eval()
    ids = tokenizer(text.joined, add_special_tokens=False).input_ids
    losses = []
    step = 31 if bos else 32
    for start in range(0, len(ids) - step + 1, step):
        window = torch.tensor([[tokenizer.bos_token_id] * bos + ids[start : start + step]])
        losses.append(model(input_ids=window, labels=window).loss.item())
    result = evaluate(mha, None, text, Options(device="cpu", window=32, bos=bos))
    assert result.student.window_nll == pytest.approx(losses, rel=1e-5)
    assert result.student.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


def test_without_a_teacher_only_the_students_numbers_are_there(mha: Path, text: Text) -> None:
    result = evaluate(mha, None, text, OPTIONS)
    assert (result.teacher, result.nll_difference, result.fidelity, result.cache_ratio) == (None, None, None, None)
    assert result.recovered_share == Share(None, "no teacher")


def test_the_batch_size_changes_no_number(mha: Path, other: Path, text: Text) -> None:
    one, many = (evaluate(mha, other, text, Options(device="cpu", window=32, batch_size=size)) for size in (1, 7))
    assert one.student.window_nll == pytest.approx(many.student.window_nll, rel=1e-5)
    assert one.fidelity is not None
    assert many.fidelity is not None
    assert one.fidelity.kl.mean == pytest.approx(many.fidelity.kl.mean, rel=1e-5)
    assert one.fidelity.same_top1 == many.fidelity.same_top1


def test_each_model_has_in_company_the_numbers_it_has_alone(mha: Path, other: Path, text: Text) -> None:
    together = evaluate(mha, other, text, OPTIONS, parent=other)
    assert together.student == evaluate(mha, None, text, OPTIONS).student
    assert together.teacher == together.parent == evaluate(other, None, text, OPTIONS).student


def test_standard_error_is_the_deviation_over_the_root_of_the_count() -> None:
    values = [1.0, 2.0, 4.0, 5.0]
    assert estimate(values).mean == 3.0
    assert estimate(values).standard_error == pytest.approx(float(torch.tensor(values).std()) / 2)
    assert estimate([1.0]).standard_error is None


def test_a_constant_difference_has_no_error_however_the_windows_vary() -> None:
    difference = paired_difference([1.5, 2.5, 9.5], [1.0, 2.0, 9.0])
    assert (difference.mean, difference.standard_error) == (0.5, 0.0)


@pytest.mark.parametrize(("student", "share"), [(1.0, 1.0), (2.0, 0.0), (1.25, 0.75), (3.0, -1.0)])
def test_recovered_share_is_the_part_of_the_lost_nats_won_back(student: float, share: float) -> None:
    teacher, parent = [1.0, 1.2, 0.8], [2.0, 2.3, 1.7]
    found = recovered_share([student, student + 0.5, student - 0.5], teacher, parent)
    assert found.value == pytest.approx(share)
    assert found.reason is None


@pytest.mark.parametrize(
    ("teacher", "parent", "reason"),
    [
        (None, [1.0, 2.0], "no teacher"),
        ([1.0, 2.0], None, "no folded parent"),
        ([1.0], [2.0], "a single window has no standard error"),
        ([1.0, 1.0, 1.0], [1.0, 1.1, 1.2], "the fold lost 0.1 nats, within noise (2 SE = 0.12)"),
        ([2.0, 2.0], [1.0, 1.0], "the fold lost -1 nats, within noise (2 SE = 0)"),
    ],
)
def test_recovered_share_is_undefined_for_a_reason(
    teacher: list[float] | None, parent: list[float] | None, reason: str
) -> None:
    student = [1.0] * len(teacher or parent or [])
    assert recovered_share(student, teacher, parent) == Share(None, reason)


def test_the_teacher_itself_recovered_all_and_the_parent_itself_nothing(make: Make, mha: Path, text: Text) -> None:
    cautious = make(initializer_range=0.02)  # near uniform, so better on random text than the sure and wrong `mha`
    teacher, parent = (evaluate(path, cautious, text, OPTIONS, parent=mha).recovered_share for path in (cautious, mha))
    assert (teacher.value, parent.value) == (pytest.approx(1.0), 0.0)
