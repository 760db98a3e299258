"""Losses on one layer's tensors: definitions on whole tensors, and what they do not depend on."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvfold.core.errors import InvalidInput
from kvfold.distill.losses.layers import (
    attention_output,
    attention_relation,
    hidden_cosine,
    hidden_mse,
    power_of,
)

from ...support.layers import drawn

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize("loss", [hidden_mse, attention_output])
def test_relative_error_is_1_for_an_output_of_zero_and_has_no_unit(loss: type(hidden_mse)) -> None:  # type: ignore[valid-type]
    teacher = drawn(6, 5)
    assert loss(torch.zeros(6, 5).double(), teacher)[0].item() == pytest.approx(6)
    student = drawn(6, 5, seed=1)
    value, count = loss(student, teacher)
    torch.testing.assert_close(value, 6 * (student - teacher).square().sum() / teacher.square().sum())
    assert count == 6
    torch.testing.assert_close(loss(student * 1e3, teacher * 1e3)[0], value)


def test_a_given_power_makes_the_sum_independent_of_how_tokens_are_cut() -> None:
    student, teacher = drawn(8, 5, seed=1), drawn(8, 5)
    power = power_of(teacher)
    parts = [hidden_mse(student[part], teacher[part], power=power)[0] for part in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(torch.stack(parts).sum(), hidden_mse(student, teacher)[0])


def test_a_teacher_that_gives_nothing_divides_by_no_zero() -> None:
    assert hidden_mse(torch.zeros(3, 4), torch.zeros(3, 4))[0] == 0


def test_cosine_reads_directions_only() -> None:
    student, teacher = drawn(6, 5, seed=1), drawn(6, 5)
    value, count = hidden_cosine(student, teacher)
    torch.testing.assert_close(value, 6 - functional.cosine_similarity(student, teacher).sum())
    torch.testing.assert_close(hidden_cosine(3 * student, teacher)[0], value)
    assert hidden_cosine(2 * teacher, teacher)[0].item() == pytest.approx(0, abs=1e-12)
    assert count == 6


@pytest.mark.parametrize("loss", [hidden_mse, hidden_cosine, attention_output])
def test_the_teacher_is_a_constant_sums_are_wide_and_widths_must_agree(loss: type(hidden_mse)) -> None:  # type: ignore[valid-type]
    student, teacher = (drawn(6, 5, seed=seed).bfloat16().requires_grad_() for seed in range(2))
    value, _ = loss(student, teacher)
    value.backward()
    assert value.dtype == torch.float32
    assert student.grad.any()
    assert teacher.grad is None
    with pytest.raises(InvalidInput, match=rf"{loss.__name__} compares .* have 5 .* the teacher's 4; use kl"):
        loss(student, torch.zeros(6, 4))


SCORED = torch.arange(14).view(2, 7) % 3 != 0


def dense_relation(student: Tensor, teacher: Tensor, position_ids: Tensor, scored: Tensor) -> Tensor:
    """On whole (S, S) relations; sum over scored tokens of the mean over heads."""
    document = (position_ids == 0).cumsum(-1)
    length = position_ids.shape[1]
    seen = torch.ones(length, length).tril().bool() & (document[:, :, None] == document[:, None, :])
    log_q, log_p = (
        (x @ x.mT / x.shape[-1] ** 0.5).masked_fill(~seen[:, None], -1e30).log_softmax(-1)
        for x in (student, teacher)
    )
    rows = functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean(1)
    return rows[scored].sum()


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("positions", [None, POSITIONS])
@pytest.mark.parametrize("scored", [None, SCORED])
def test_relations_in_blocks_are_dense(block: int, positions: Tensor | None, scored: Tensor | None) -> None:
    ours, theirs = (drawn(2, 3, 7, 4).requires_grad_() for _ in range(2))
    teacher = drawn(2, 3, 7, 6, seed=1)
    value, count = attention_relation(ours, teacher, position_ids_BS=positions, scored_BS=scored, block=block)
    whole, everywhere = torch.arange(7).expand(2, 7), torch.ones(2, 7).bool()
    expected = dense_relation(
        theirs, teacher, whole if positions is None else positions, everywhere if scored is None else scored
    )
    assert count == (14 if scored is None else int(SCORED.sum()))
    torch.testing.assert_close(value, expected)
    (value * 0.5).backward()
    (expected * 0.5).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_relations_do_not_change_with_a_rotation_of_the_heads_numbers() -> None:
    teacher = drawn(2, 3, 7, 4)
    rotation, _ = torch.linalg.qr(drawn(4, 4, seed=2))
    assert attention_relation(teacher, teacher)[0] == 0
    assert attention_relation(teacher @ rotation, teacher)[0].item() == pytest.approx(0, abs=1e-12)
    assert attention_relation(2 * teacher, teacher)[0] > 0.01


def test_other_numbers_of_heads_are_joined_and_cut_alike() -> None:
    student, teacher = drawn(2, 2, 7, 4), drawn(2, 6, 7, 4, seed=1)
    # Two relation heads, of three heads each.
    joined = teacher.unflatten(1, (2, 3)).transpose(2, 3).flatten(3)
    torch.testing.assert_close(
        attention_relation(student, teacher)[0], attention_relation(student, joined)[0]
    )
