"""The chunked losses are the dense ones."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvfold.distill.head import Predictions
from kvfold.distill.losses import LOSSES, ce, kl

T, V, D = 13, 37, 8


def predictions(seed: int, bias: bool = True) -> Predictions:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, row = (torch.randn(shape, generator=generator) for shape in ((T, D), (V, D), (V,)))
    return Predictions(hidden.requires_grad_(), weight.requires_grad_(), row.requires_grad_() if bias else None)


def dense(name: str, student: Predictions, teacher: Predictions, labels: Tensor) -> Tensor:
    log_q = torch.log_softmax(functional.linear(*student), -1)
    if name == "ce":
        return functional.nll_loss(log_q, labels, reduction="sum")
    log_p = torch.log_softmax(functional.linear(*teacher), -1).detach()
    return functional.kl_div(log_q, log_p, log_target=True, reduction="sum")


LABELS = torch.arange(T) % V


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_chunked_equals_dense_in_value_and_gradients(name: str, chunk: int, bias: bool) -> None:
    ours, theirs, teacher = predictions(0, bias), predictions(0, bias), predictions(1)
    loss = {"kl": kl, "ce": ce}[name]  # the table's type has no chunk
    value, count = loss(ours, teacher, LABELS, chunk=chunk)
    expected = dense(name, theirs, teacher, LABELS)
    assert count == T
    torch.testing.assert_close(value, expected)
    (value * 0.5).backward()
    (expected * 0.5).backward()
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None and other is not None:
            torch.testing.assert_close(mine.grad, other.grad)
    assert teacher.hidden_TD.grad is None


def test_a_tied_head_gets_both_gradients() -> None:
    ids, teacher = torch.arange(T) % V, predictions(1)
    gradients = []
    for is_chunked in (True, False):
        weight = predictions(0).weight_VD
        student = Predictions(torch.tanh(weight[ids]), weight, None)
        value = kl(student, teacher, LABELS, chunk=5)[0] if is_chunked else dense("kl", student, teacher, LABELS)
        value.backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients)


def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient() -> None:
    student, teacher = predictions(0), predictions(0)
    value, _ = kl(student, teacher, LABELS)
    value.backward()
    assert value == 0
    assert all(not tensor.grad.any() for tensor in student if tensor is not None and tensor.grad is not None)


def test_a_teacher_may_be_wider() -> None:
    wide = Predictions(torch.randn(T, 2 * D), torch.randn(V, 2 * D), None)
    student = predictions(0)
    torch.testing.assert_close(kl(student, wide, LABELS, chunk=3)[0], dense("kl", student, wide, LABELS))


def test_autocast_rounds_the_products_but_not_the_sums() -> None:
    student, teacher = predictions(0), predictions(1)
    with torch.autocast("cpu", torch.bfloat16):
        value, _ = kl(student, teacher, LABELS, chunk=4)
    assert value.dtype == torch.float32
    value.backward()
    assert student.weight_VD.grad is not None
    assert student.weight_VD.grad.dtype == torch.float32
    torch.testing.assert_close(value, dense("kl", student, teacher, LABELS), rtol=0.05, atol=0.05)


def test_a_frozen_head_costs_no_gradient() -> None:
    student = predictions(0, bias=False)
    frozen = student._replace(weight_VD=student.weight_VD.detach())
    value, _ = kl(frozen, predictions(1), LABELS)
    value.backward()
    assert frozen.hidden_TD.grad is not None
    assert frozen.weight_VD.grad is None
