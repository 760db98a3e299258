"""The steps of refinement: orthogonalised ones for matrices (Muon), Adam's for biases and norms."""

import math

import torch
from torch import Tensor

_SQUARE, _SMALL = 0.95, 1e-12
_QUINTIC, _STEPS = (3.4445, -4.7750, 2.0315), 5
_NARROW = 1.5  # ratio of the sides up to which the iteration itself takes fewer operations
# And all with heads; other tensors of two dimensions are biases.
_MATRICES = {"down_CD", "down_CE", "k_rope_RD", "q_down_AD", "level_CC"}


def order(used: Tensor, steps: int, batch: int, *, passes: bool, seed: int) -> list[Tensor]:
    """Return the sequences of each step: drawn anew for each, or in passes through all of them.

    In passes, the running mean of the gradients is of sequences that differ, and has less noise. A step may
    lie across two passes.

    Args:
        used: numbers of the sequences.
        steps: of the descent.
        batch: sequences in a step; with fewer in all, a step takes each once.
        passes: whether all are taken once before any is taken again.
        seed: of the order.
    """
    batch = min(batch, len(used))
    generator = torch.Generator().manual_seed(seed)
    if not passes:
        return [used[torch.randperm(len(used), generator=generator)[:batch]] for _ in range(steps)]
    rounds = range(math.ceil(steps * batch / len(used)))
    drawn = torch.cat([torch.randperm(len(used), generator=generator) for _ in rounds])
    return list(used[drawn[: steps * batch]].split(batch))


class Moving:
    """The running gradient of one tensor, from which a step of the tensor's own root mean square follows."""

    def __init__(self, name: str, value: Tensor, momentum: float) -> None:
        self._size = float(value.detach().square().mean().sqrt()) if value.numel() else 0.0
        self._momentum = momentum
        self._is_matrix = value.numel() > 0 and (value.ndim == 3 or name in _MATRICES)
        self._heads = 1 if name == "o_DNH" else 0
        self._mean, self._square = torch.zeros_like(value), torch.zeros_like(value)

    def step(self, gradient: Tensor, count: int) -> Tensor:
        """Return the step that follows `count` earlier ones."""
        self._mean.lerp_(gradient, 1 - self._momentum)
        if not self._is_matrix:  # biases and norms: Adam's (arXiv 1412.6980)
            self._square.lerp_(gradient.square(), 1 - _SQUARE)
            root = (self._square / (1 - _SQUARE ** (count + 1))).sqrt()
            return self._size * (self._mean / (1 - self._momentum ** (count + 1))) / (root + _SMALL)
        matrices = torch.lerp(gradient, self._mean, self._momentum)  # Nesterov's
        heads_first = matrices if gradient.ndim == 2 else matrices.movedim(self._heads, 0)
        # Its root mean square is about 1.
        unit = orthogonal(heads_first) * math.sqrt(max(heads_first.shape[-2:]))
        return (unit if gradient.ndim == 2 else unit.movedim(0, self._heads)) * self._size


def orthogonal(matrices: Tensor) -> Tensor:
    """Bring the singular values of every matrix (..., m, n) to about 1 (0.7 to 1.2).

    This takes five Newton-Schulz steps of Muon's quintic iteration (arXiv 2502.16982, equation 2).
    """
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + _SMALL)
    if x.shape[-1] > _NARROW * x.shape[-2]:
        x = _by_gram(x)
    else:
        for _ in range(_STEPS):
            x = _polynomial(x @ x.mT) @ x
    return x if wide else x.mT


def _by_gram(x: Tensor) -> Tensor:
    """Return the same as the iteration, with two products at the full width instead of ten.

    A step multiplies X by a polynomial of X Xᵀ, and all of these commute. So X Xᵀ alone is iterated, and the
    product of the polynomials is multiplied by X at the end. In float32 the result is off by some 1e-4 of
    its norm, since small singular values are squared.
    """
    gram = x @ x.mT
    product = _polynomial(gram)
    factor = product
    for _ in range(_STEPS - 1):
        gram = factor @ gram @ factor
        factor = _polynomial(gram)
        product = factor @ product
    return product @ x


def _polynomial(gram: Tensor) -> Tensor:
    found = _QUINTIC[1] * gram + _QUINTIC[2] * gram @ gram
    found.diagonal(dim1=-2, dim2=-1).add_(_QUINTIC[0])
    return found
