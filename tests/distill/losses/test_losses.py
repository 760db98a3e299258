"""The chunked losses of the vocabulary are the dense ones, in value and gradient."""

import math

import pytest
import torch
from torch.nn import functional

from kvfold.distill.data.batch import IGNORED
from kvfold.distill.losses.predictions import Predictions
from kvfold.distill.losses.vocabulary import mix
from kvfold.distill.recipe.recipe import LossName

from ...support.dense_losses import (
    LABELS,
    VOCABULARY,
    T,
    V,
    check_gradients,
    chunked,
    dense,
    divergence,
    log_probabilities,
    predictions,
)


@pytest.mark.parametrize("name", VOCABULARY)
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunked_equals_dense(name: LossName, chunk: int, bias: bool, dtype: torch.dtype) -> None:
    ours, theirs, teacher = (predictions(seed, bias=bias, dtype=dtype) for seed in (0, 0, 1))
    value = chunked(name, ours, teacher, chunk=chunk)
    expected = dense(name, theirs, teacher)
    assert value.dtype == dtype
    torch.testing.assert_close(value, expected)
    (value * 0.5).backward()
    (expected * 0.5).backward()
    check_gradients(ours, theirs)
    assert teacher.hidden_TD.grad is None


@pytest.mark.parametrize("name", VOCABULARY)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("form", [{"scale": 0.3}, {"soft_cap": 1.5}, {"scale": 2.0, "soft_cap": 3.0}])
def test_temperature_scale_and_soft_cap(name: LossName, temperature: float, form: dict[str, float]) -> None:
    ours, theirs, teacher = predictions(0, **form), predictions(0, **form), predictions(1, soft_cap=2.0)
    value = chunked(name, ours, teacher, temperature=temperature, chunk=5)
    expected = dense(name, theirs, teacher, temperature)
    torch.testing.assert_close(value, expected)
    value.backward()
    expected.backward()
    check_gradients(ours, theirs)


@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_jsd_from_the_forward_to_the_reverse_divergence(beta: float) -> None:
    ours, theirs, teacher = predictions(0), predictions(0), predictions(1)
    value = chunked("jsd", ours, teacher, beta=beta, chunk=5)
    expected = dense("jsd", theirs, teacher, beta=beta)
    torch.testing.assert_close(value, expected)
    value.backward()
    expected.backward()
    check_gradients(ours, theirs)


def test_jsd_has_its_limits_bounds_and_symmetry() -> None:
    student, teacher = (
        predictions(0, scale=0.2),
        predictions(1, scale=0.2),
    )  # alike enough to be near the limits at 1e-9
    forward, backward = chunked("kl", student, teacher), chunked("reverse_kl", student, teacher)
    torch.testing.assert_close(chunked("jsd", student, teacher, beta=1e-9) / 1e-9, forward, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        chunked("jsd", student, teacher, beta=1 - 1e-9) / 1e-9, backward, rtol=1e-6, atol=0
    )
    torch.testing.assert_close(chunked("jsd", student, teacher), chunked("jsd", teacher, student))
    assert 0 < chunked("jsd", student, teacher) < T * math.log(2)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_where_probabilities_underflow(beta: float) -> None:
    # Entry 2 has no probability in float32 in either, entry 1 in one of them alone.
    logits = torch.tensor([[0.0, -3e4, -2e4], [-200.0, 0.0, -1e4]])
    student, teacher = (
        Predictions(torch.ones(1, 1), row[:, None].clone().requires_grad_(), None) for row in logits
    )
    value = chunked("jsd", student, teacher, LABELS[:1], beta=beta)
    value.backward()
    # Each token is sure of another: β ln(1/β) + (1 - β) ln(1/(1 - β)).
    assert value.item() == pytest.approx(-beta * math.log(beta) - (1 - beta) * math.log(1 - beta), rel=1e-6)
    assert student.weight_VD.grad.isfinite().all()


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_student_equal_to_its_teacher_has_no_loss(name: LossName, is_autocast: bool) -> None:
    student, teacher = (predictions(0, dtype=torch.float32, soft_cap=2.0) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        value = chunked(name, student, teacher, beta=0.3, temperature=2.0)
    value.backward()
    assert value == 0
    assert all(
        tensor.grad is not None and not tensor.grad.any() for tensor in student[:3] if tensor is not None
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_mixture_is_a_sum_over_one_logits(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, teacher = predictions(0), predictions(0), predictions(1)
    weights = {"kl": 0.7, "ce": 0.1, "jsd": 0.5, "reverse_kl": 0.2, "hidden_mse": 0.0}
    made: list[slice] = []
    logits = Predictions.logits
    monkeypatch.setattr(Predictions, "logits", lambda self, rows: (made.append(rows), logits(self, rows))[1])
    loss, sums = mix(ours, teacher, LABELS, weights, temperature=temperature, beta=0.3, chunk=5)
    assert len(made) == 2 * 3  # a student's and a teacher's for each of three chunks
    parts = {name: dense(name, theirs, teacher, temperature, 0.3) for name in VOCABULARY}
    expected = torch.stack([weights[name] * part for name, part in parts.items()]).sum()
    torch.testing.assert_close(loss, expected)
    for name, part in parts.items():
        torch.testing.assert_close(sums[name], part.detach())
        assert not sums[name].requires_grad
    loss.backward()
    expected.backward()
    check_gradients(ours, theirs)


@pytest.mark.parametrize("weights", [{}, {"ce": 1.0}, {"jsd": 1.0}, {"kl": 1.0}])
def test_a_mixture_measures_the_student_on_the_way(weights: dict[LossName, float]) -> None:
    student, teacher = predictions(0), predictions(1)
    log_q, log_p = log_probabilities(student).detach(), log_probabilities(teacher).detach()
    loss, sums = mix(student, teacher, LABELS, weights, temperature=2.0, chunk=4)
    assert sums.keys() == {*weights, "forward_kl", "same_top1", "teacher_ce"}
    torch.testing.assert_close(sums["forward_kl"], divergence(log_p, log_q))
    torch.testing.assert_close(sums["teacher_ce"], functional.nll_loss(log_p, LABELS, reduction="sum"))
    same = (log_q.argmax(-1) == log_p.argmax(-1)).sum()
    assert sums["same_top1"] == same
    assert 0 < same < T
    if not weights:
        loss.backward()
        assert loss == 0
        assert not student.weight_VD.grad.any()


def test_without_a_teacher_there_is_cross_entropy() -> None:
    ours, theirs = predictions(0), predictions(0)
    loss, sums = mix(ours, None, LABELS, {"ce": 1.0}, chunk=4)
    assert sums.keys() == {"ce"}
    torch.testing.assert_close(loss, dense("ce", theirs, theirs))
    with pytest.raises(AssertionError, match="there is none"):
        chunked("kl", ours, None)


@pytest.mark.parametrize("name", VOCABULARY)
@pytest.mark.parametrize(("student_width", "teacher_width"), [(V, V + 3), (V + 3, V)])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_padded_head(name: LossName, student_width: int, teacher_width: int, temperature: float) -> None:
    """Models are compared over the logits that both have; cross entropy is over all of a model's."""
    ours, theirs = predictions(0, width=student_width), predictions(0, width=student_width)
    teacher = predictions(1, width=teacher_width)
    weights = {"ce": 0.3, name: 0.7}
    loss, sums = mix(ours, teacher, LABELS, weights, temperature=temperature, chunk=5)
    parts = {
        loss: dense(loss, theirs, teacher, temperature, width=None if loss == "ce" else V) for loss in weights
    }
    expected = torch.stack([weight * parts[loss] for loss, weight in weights.items()]).sum()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    check_gradients(ours, theirs)
    torch.testing.assert_close(sums["teacher_ce"], dense("ce", teacher, teacher).detach())
    log_q, log_p = log_probabilities(theirs, width=V).detach(), log_probabilities(teacher, width=V).detach()
    torch.testing.assert_close(sums["forward_kl"], divergence(log_p, log_q))
    assert sums["same_top1"] == (log_q.argmax(-1) == log_p.argmax(-1)).sum()


def test_tokens_that_are_not_scored_have_no_part() -> None:
    ours, theirs, teacher = predictions(0), predictions(0), predictions(1)
    labels = LABELS.clone()
    labels[[0, 5, 12]] = IGNORED
    kept = labels != IGNORED
    loss, _ = mix(ours.at(kept), teacher.at(kept), labels[kept], {"kl": 1.0, "ce": 1.0}, chunk=4)
    log_q, log_p = log_probabilities(theirs), log_probabilities(teacher).detach()
    expected = functional.nll_loss(log_q, labels, reduction="sum", ignore_index=IGNORED) + divergence(
        log_p[kept], log_q[kept]
    )
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    check_gradients(ours, theirs)


def test_a_batch_without_scored_tokens_has_a_gradient_of_zero() -> None:
    student, teacher = predictions(0), predictions(1)
    none = torch.zeros(T, dtype=torch.bool)
    loss, _ = mix(student.at(none), teacher.at(none), LABELS[none], {"kl": 1.0})
    loss.backward()
    assert loss == 0
    assert all(
        tensor.grad is not None and not tensor.grad.any() for tensor in student[:3] if tensor is not None
    )


def test_a_tied_head_gets_both_gradients() -> None:
    ids, teacher = torch.arange(T) % V, predictions(1)
    gradients = []
    for is_chunked in (True, False):
        weight = predictions(0).weight_VD
        student = Predictions(torch.tanh(weight[ids]), weight, None)
        value = chunked("kl", student, teacher, chunk=5) if is_chunked else dense("kl", student, teacher)
        value.backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients)
