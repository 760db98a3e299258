"""Gradients that are formed chunk by chunk: memory, precision, and being asked in odd ways."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.distill.losses.chunks import CHUNK_ELEMENTS_ELSEWHERE
from kvfold.distill.losses.predictions import Predictions
from kvfold.distill.losses.vocabulary import mix
from kvfold.distill.recipe.recipe import LossName
from kvfold.models.head import HeadForm

from ...support.dense_losses import VOCABULARY, D, T, V, check_gradients, chunked, dense, predictions
from ...support.latent_decoding import Largest


class Held(TorchDispatchMode):
    """Counts the bytes of all storages that operations made and that are still held; remembers the most."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for item in output if isinstance(output, tuple | list) else [output]:
            if isinstance(item, Tensor) and item.untyped_storage()._cdata not in self._known:
                storage = item.untyped_storage()
                self._known.add(storage._cdata)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
        return output

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def peak_gigabytes(loss: Callable[[Predictions, Predictions, Tensor], Tensor]) -> float:
    """Of a forward and backward pass in bfloat16 autocast, above models of 8,192 x 128,256 x 4,096."""
    tokens, vocabulary, hidden = 8192, 128256, 4096
    with FakeTensorMode():
        student = Predictions(torch.empty(tokens, hidden), torch.empty(vocabulary, hidden), None)
        teacher = Predictions(student.hidden_TD.bfloat16(), student.weight_VD.bfloat16(), None)
        labels = torch.zeros(tokens, dtype=torch.int64)
        inputs = [*student[:2], *teacher[:2], labels]
        for tensor in student[:2]:
            tensor.requires_grad_()
        with Held(*inputs) as held:
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(student, teacher, labels)
            value.backward()
    return held.peak / 1e9


def test_memory_at_the_size_of_a_large_vocabulary() -> None:
    def whole(student: Predictions, teacher: Predictions, labels: Tensor) -> Tensor:
        return dense("kl", student, teacher)

    def mixed(student: Predictions, teacher: Predictions, labels: Tensor) -> Tensor:
        return mix(
            student, teacher, labels, {"kl": 0.9, "ce": 0.1}, chunk=CHUNK_ELEMENTS_ELSEWHERE // 128256
        )[0]

    assert peak_gigabytes(whole) > 15
    # 4.2 of it the head's gradient and its head in bfloat16, with a product of that size.
    assert peak_gigabytes(mixed) < 7


def test_logits_of_all_tokens_never_exist() -> None:
    tokens, vocabulary, chunk = 64, 500, 4
    weights = {"kl": 0.5, "reverse_kl": 0.5, "jsd": 1.0, "ce": 1.0}
    hidden, head = torch.randn(tokens, D, requires_grad=True), torch.randn(vocabulary, D, requires_grad=True)
    with Largest() as largest:
        student = Predictions(hidden, head, None, HeadForm(1.0, 3.0))
        teacher = Predictions(torch.randn(tokens, D), torch.randn(vocabulary, D), None)
        mix(student, teacher, torch.zeros(tokens, dtype=torch.int64), weights, temperature=2.0, chunk=chunk)[
            0
        ].backward()
    assert largest.elements == max(chunk * vocabulary, vocabulary * D)  # where dense logits are 32,000


@pytest.mark.parametrize("name", VOCABULARY)
def test_gradients_are_those_of_the_value(name: LossName) -> None:
    teacher = predictions(1)

    def value(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        student = Predictions(hidden, weight, bias, HeadForm(0.7, 2.0))
        return chunked(name, student, teacher, temperature=1.7, beta=0.3, chunk=4)

    assert torch.autograd.gradcheck(value, predictions(0)[:3], fast_mode=True)


def test_a_frozen_head_costs_no_gradient() -> None:
    student = predictions(0, bias=False)
    frozen = student._replace(weight_VD=student.weight_VD.detach())
    teacher = predictions(1)
    with Largest() as largest:
        chunked("kl", frozen, teacher, chunk=1).backward()
    assert frozen.hidden_TD.grad is not None
    assert frozen.weight_VD.grad is None
    assert largest.elements < V * D


def test_nothing_is_differentiated_where_gradients_are_off() -> None:
    with torch.no_grad():
        value = chunked("kl", predictions(0), predictions(1))
    assert not value.requires_grad
    torch.testing.assert_close(value, dense("kl", predictions(0), predictions(1)).detach())


def test_a_graph_may_be_kept_for_another_backward_pass() -> None:
    ours, theirs, teacher = predictions(0), predictions(0), predictions(1)
    value = chunked("reverse_kl", ours, teacher, chunk=5)
    for factor, keeps in ((0.5, True), (3.0, False)):
        (value * factor).backward(retain_graph=keeps)
    (dense("reverse_kl", theirs, teacher) * 3.5).backward()
    check_gradients(ours, theirs)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        (value * 1).backward()


def test_a_teacher_may_be_wider() -> None:
    wide = Predictions(torch.randn(T, 2 * D).double(), torch.randn(V, 2 * D).double(), None)
    student = predictions(0)
    torch.testing.assert_close(chunked("kl", student, wide, chunk=3), dense("kl", student, wide))


@pytest.mark.parametrize("name", VOCABULARY)
def test_autocast_rounds_the_products_but_not_the_sums(name: LossName) -> None:
    ours, theirs, teacher = (predictions(seed, dtype=torch.float32) for seed in (0, 0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        value = chunked(name, ours, teacher, chunk=4)
    expected = dense(name, theirs, teacher)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=0.02, atol=0)
    value.backward()
    expected.backward()
    assert ours.weight_VD.grad.dtype == torch.float32
    check_gradients(ours, theirs, rtol=0.1, atol=0.1)


def test_weights_in_bfloat16_sum_their_chunks_in_float32() -> None:
    # One token a chunk, 400 equal tokens: added up in bfloat16, the gradient would stop growing at 256 times
    # one of them.
    head = torch.randn(V, D).bfloat16().requires_grad_()
    student = Predictions(torch.ones(400, D).bfloat16(), head, None)
    chunked("ce", student, None, torch.zeros(400, dtype=torch.int64), chunk=1).backward()
    (one,) = torch.autograd.grad(
        chunked("ce", student.at(torch.arange(400) == 0), None, torch.zeros(1, dtype=torch.int64)), head
    )
    assert head.grad.dtype == torch.bfloat16
    torch.testing.assert_close(head.grad.float(), one.float() * 400, rtol=0.02, atol=0.02)
