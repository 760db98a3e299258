"""The rotation of a latent in which rounding costs least.

A norm does not see a rotation O of the latent: (O down, up Oᵀ) is the same function. Rounded weights are
not. A number of `up` errs in proportion to its size, and its error is multiplied by a coordinate of the
latent. A row of `down`, and a coordinate that is rounded itself, err in proportion to their size, and their
errors are multiplied by a column of `up`. Let P be the second moment of the latent plus the Gram matrix of
the rows of `down`, and Q the Gram matrix of the columns of `up`. Then all errors together cost

    Σ_i (O P Oᵀ)_ii (O Q Oᵀ)_ii.

Jacobi rotations make it small: in a plane it is a sinusoid of four times the angle. Half of all coordinates
turn with the other half at once.

Legend: attention.py; J planes.
"""

import torch
from torch import Tensor

SWEEPS = 3  # over all planes; the fourth changes the cost by less than 1 % (docs/notes/latent-norm.md)


def least_rounded(input_BTD: Tensor, down_CD: Tensor, up_UC: Tensor) -> Tensor:
    """Return O (C, C), orthogonal, with which (O down, up Oᵀ) is rounded at the least cost.

    Takes about 60 C³ operations.

    Args:
        input_BTD: what the latent is projected from; each token counts with a latent of length 1.
        down_CD: rows that the latent is projected by, float64.
        up_UC: rows that read the latent, float64.
    """
    moment_CC = down_CD.new_zeros(len(down_CD), len(down_CD))
    for input_TD in input_BTD:
        latent_TC = torch.nn.functional.normalize(input_TD.to(down_CD) @ down_CD.mT, dim=-1)
        moment_CC += latent_TC.mT @ latent_TC
    return turn(_share(moment_CC) + _share(down_CD @ down_CD.mT), _share(up_UC.mT @ up_UC))


def turn(first_CC: Tensor, second_CC: Tensor, sweeps: int = SWEEPS) -> Tensor:
    """Return O (C, C), orthogonal, with a small Σ_i (O P Oᵀ)_ii (O Q Oᵀ)_ii for P and Q symmetric, float64.

    Example:
        >>> even_CC = turn(torch.diag(torch.tensor([1.0, 0.0])), torch.diag(torch.tensor([1.0, 0.0])))
        >>> even_CC.square()
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    width = len(first_CC)
    turned = [first_CC.clone(), second_CC.clone()]
    turn_CC = torch.eye(width).to(first_CC)
    ring = torch.arange(width + width % 2, device=first_CC.device)
    room = first_CC.new_empty(4 * (width // 2) * width)
    for _ in range(sweeps * (len(ring) - 1)):
        one_J, other_J = ring[: len(ring) // 2], ring[len(ring) // 2 :].flip(0)
        real = (one_J < width) & (other_J < width)  # of an odd number one waits
        one_J, other_J = one_J[real], other_J[real]
        cos_J, sin_J = _angles(turned[0], turned[1], one_J, other_J)
        for matrix_CC in (*turned, turn_CC):
            _rotate(matrix_CC, 0, one_J, other_J, cos_J[:, None], sin_J[:, None], room.view(4, -1, width))
        for matrix_CC in turned:
            _rotate(matrix_CC, 1, one_J, other_J, cos_J, sin_J, room.view(4, width, -1))
        ring = torch.cat([ring[:1], ring[-1:], ring[1:-1]])
    return turn_CC


def _angles(first_CC: Tensor, second_CC: Tensor, one_J: Tensor, other_J: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles that cost least in planes (i, j).

    Turned by t, the differences of the diagonals are d cos 2t + 2 e sin 2t, where e is off the diagonal.
    """
    halves = [
        ((matrix_CC[one_J, one_J] - matrix_CC[other_J, other_J]) / 2, matrix_CC[one_J, other_J])
        for matrix_CC in (first_CC, second_CC)
    ]
    (first_J, first_off_J), (second_J, second_off_J) = halves
    cos_J = first_J * second_J - first_off_J * second_off_J
    sin_J = first_J * second_off_J + first_off_J * second_J
    angle_J = (torch.atan2(sin_J, cos_J) + torch.pi) / 4  # the cost has its least where cos (4 t - φ) = -1
    return angle_J.cos(), angle_J.sin()


def _rotate(
    matrix_CC: Tensor, dim: int, one_J: Tensor, other_J: Tensor, cos: Tensor, sin: Tensor, room: Tensor
) -> None:
    """Turn rows (`dim` 0) or columns (1) i and j of a matrix, in place.

    All results go into `room`, four matrices of J rows or columns: new memory for each of these many small
    steps would take two thirds more time.
    """
    one, other, turned, part = room
    torch.index_select(matrix_CC, dim, one_J, out=one)
    torch.index_select(matrix_CC, dim, other_J, out=other)
    torch.mul(cos, one, out=turned).add_(torch.mul(sin, other, out=part))
    matrix_CC.index_copy_(dim, one_J, turned)
    torch.mul(cos, other, out=turned).sub_(torch.mul(sin, one, out=part))
    matrix_CC.index_copy_(dim, other_J, turned)


def _share(matrix_CC: Tensor) -> Tensor:
    trace = matrix_CC.trace()
    return matrix_CC / trace if trace > 0 else matrix_CC
