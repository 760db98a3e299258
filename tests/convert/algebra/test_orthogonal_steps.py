"""Steps of refinement: which sequences they take, and how far they go."""

import pytest
import torch

from kvfold.convert.algebra.orthogonal_steps import Moving, order, orthogonal


@pytest.mark.parametrize("batch", [2, 4, 7])
def test_steps_pass_through_all_sequences_before_they_take_one_again(batch: int) -> None:
    used = torch.tensor([3, 4, 5, 7, 8, 9, 11])
    taken = torch.cat(order(used, 15, batch, passes=True, seed=0))
    assert len(taken) == 15 * batch
    for one in taken.split(len(used))[:-1]:
        assert sorted(one.tolist()) == used.tolist()
    last = taken.split(len(used))[-1].tolist()
    assert len(set(last)) == len(last)
    assert torch.cat(order(used, 15, batch, passes=True, seed=0)).equal(taken)
    assert not torch.cat(order(used, 15, batch, passes=True, seed=1)).equal(taken)


@pytest.mark.parametrize("passes", [False, True])
def test_a_step_takes_no_sequence_twice_where_there_are_few(passes: bool) -> None:
    steps = order(torch.tensor([0, 1, 2]), 4, 8, passes=passes, seed=0)
    assert [sorted(step.tolist()) for step in steps] == [[0, 1, 2]] * 4


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_a_matrix_takes_orthogonal_steps_from_the_running_mean(momentum: float) -> None:
    """By hand: Nesterov's mix of the gradient and its running mean, with all singular values about 1."""
    value = torch.eye(4, 6) * 2
    drawn = torch.Generator().manual_seed(0)
    first, second = (torch.randn(4, 6, generator=drawn) for _ in range(2))
    moving = Moving("down_CD", value, momentum)
    moving.step(first, 0)
    step = moving.step(second, 1)
    mean = momentum * (1 - momentum) * first + (1 - momentum) * second
    left, _, right = torch.linalg.svd((1 - momentum) * second + momentum * mean, full_matrices=False)
    size = float(value.square().mean().sqrt()) * 6**0.5
    found = torch.diagonal(left.mT @ step @ right.mT) / size
    assert ((found > 0.6) & (found < 1.3)).all()
    off = left.mT @ step @ right.mT / size - torch.diag(found)
    assert off.abs().max() < 1e-3


def test_a_bias_takes_steps_of_its_own_size_in_each_number() -> None:
    moving = Moving("o_D", torch.tensor([1.0, -1.0, 1.0]), 0.8)
    assert torch.allclose(moving.step(torch.tensor([5.0, -0.1, 2.0]), 0), torch.tensor([1.0, -1.0, 1.0]))


@pytest.mark.parametrize("shape", [(4, 5), (5, 4), (4, 40), (40, 4), (3, 8, 64)])
@pytest.mark.parametrize("decades", [0, 4])
def test_singular_values_take_the_same_steps_at_every_shape(shape: tuple[int, ...], decades: int) -> None:
    """Five steps of the quintic on each singular value, in float64."""
    drawn = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=drawn).double(), full_matrices=False)
    value = 10 ** -torch.linspace(0, decades, right.shape[-2], dtype=torch.float64)
    found = orthogonal((left * value @ right).float())
    value = value / value.norm()
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    off = found.double() - left * value @ right
    # The Gram matrix squares the singular values; in float32 some processors then lose more of the small ones.
    assert off.abs().max() < (6e-4 if decades else 5e-6)
    assert off.square().mean().sqrt() < (2e-4 if decades else 1e-6)
