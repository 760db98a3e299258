"""Perplexity is exp of the mean loss that models report; differences are paired; shares follow a formula."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.checkpoints.quality_blocks import RecoveredLoss
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.suites.perplexity import recovered_share
from kvfold.texts.corpus import Text

from ..conftest import Make

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
    assert result.ppl.student.window_nll == pytest.approx(losses, rel=1e-5)
    assert result.ppl.student.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    # A byte is a token here: only the first of each window without BOS is not scored.
    bits = sum(losses) / len(losses) / math.log(2)
    assert result.ppl.student.bits_per_byte == pytest.approx(bits, rel=1e-5)
    assert result.ppl.student.byte_perplexity == pytest.approx(2**bits, rel=1e-5)


def test_without_a_teacher_only_the_students_numbers_are_there(mha: Path, text: Text) -> None:
    result = evaluate(mha, None, text, OPTIONS)
    found = result.ppl
    assert (found.teacher, found.difference, found.ratio, result.fidelity, result.cache.ratio) == (None,) * 5
    assert found.recovered_share == RecoveredLoss(None, "no teacher")


def test_the_batch_size_changes_no_number(mha: Path, other: Path, text: Text) -> None:
    one, many = (
        evaluate(mha, other, text, Options(device="cpu", window=32, batch_size=size)) for size in (1, 7)
    )
    assert one.ppl.student.window_nll == pytest.approx(many.ppl.student.window_nll, rel=1e-5)
    assert one.fidelity.kl.mean == pytest.approx(many.fidelity.kl.mean, rel=1e-5)
    assert one.fidelity.same_top1 == many.fidelity.same_top1


def test_each_model_has_in_company_the_numbers_it_has_alone(mha: Path, other: Path, text: Text) -> None:
    together = evaluate(mha, other, text, OPTIONS, parent=other)
    assert together.ppl.student == evaluate(mha, None, text, OPTIONS).ppl.student
    assert together.ppl.teacher == together.ppl.parent == evaluate(other, None, text, OPTIONS).ppl.student


def test_the_ratio_is_of_both_perplexities_with_their_interval(mha: Path, other: Path, text: Text) -> None:
    found = evaluate(mha, other, text, OPTIONS).ppl
    assert found.ratio.mean == pytest.approx(found.student.perplexity / found.teacher.perplexity)
    difference = np.subtract(found.student.window_nll, found.teacher.window_nll)
    interval = stats.ttest_1samp(difference, 0).confidence_interval(0.95)
    assert (found.difference.low, found.difference.high) == pytest.approx(tuple(interval))
    assert (found.ratio.low, found.ratio.high) == pytest.approx(tuple(np.exp(interval)))


@pytest.mark.parametrize(("student", "share"), [(1.0, 1.0), (2.0, 0.0), (1.25, 0.75), (3.0, -1.0)])
def test_recovered_share_is_the_part_of_the_lost_nats_won_back(student: float, share: float) -> None:
    teacher, parent = [1.0, 1.2, 0.8], [2.0, 2.3, 1.7]
    found = recovered_share([student, student + 0.5, student - 0.5], teacher, parent)
    assert found.value == pytest.approx(share)
    assert found.reason is None


@pytest.mark.parametrize(("teacher", "parent", "reason"), [
    (None, [1.0, 2.0], "no teacher"),
    ([1.0, 2.0], None, "no folded parent"),
    ([1.0], [2.0], "a single window has no standard error"),
    ([1.0, 1.0, 1.0], [1.0, 1.1, 1.2], "the fold lost 0.1 nats, within noise (2 SE = 0.12)"),
    ([2.0, 2.0], [1.0, 1.0], "the fold lost -1 nats, within noise (2 SE = 0)"),
])  # fmt: skip
def test_no_share_for_a_reason(teacher: list[float] | None, parent: list[float] | None, reason: str) -> None:
    student = [1.0] * len(teacher or parent or [])
    assert recovered_share(student, teacher, parent) == RecoveredLoss(None, reason)


def test_the_teacher_recovered_all_and_the_parent_nothing(make: Make, mha: Path, text: Text) -> None:
    # Near uniform, so better on random text than the sure and wrong `mha`.
    cautious = make(initializer_range=0.02)
    teacher, parent = (
        evaluate(path, cautious, text, OPTIONS, parent=mha).ppl.recovered_share for path in (cautious, mha)
    )
    assert (teacher.value, parent.value) == (pytest.approx(1.0), 0.0)
