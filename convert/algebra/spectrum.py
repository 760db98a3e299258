"""The spectrum that a layer's latent was cut from, in few enough numbers for kvfold.json."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MOST = 64  # numbers of a spectrum that are kept: enough to draw it


@dataclass(frozen=True)
class LatentSpectrum:
    """The cost of leaving out each direction of a layer's un-rotated keys and values, the dearest first.

    A latent of rank R keeps the first R, so that it loses the sum of the others.

    Attributes:
        size: of the directions.
        index: numbers of the directions that are listed, from 1; all of them, or some at even steps of their
            logarithm.
        cost: of these directions, in nats per token where there are statistics, otherwise in the unit of the
            weights-only metric.
    """

    size: int
    index: tuple[int, ...]
    cost: tuple[float, ...]


def spectrum(energy_M: Tensor) -> LatentSpectrum:
    """Return the spectrum of the energies of `subspaces.low_rank`, float64, falling.

    A quadratic form costs half of them.
    """
    size = len(energy_M)
    index = _steps(size, MOST)
    return LatentSpectrum(size, tuple(index), tuple(float(energy_M[number - 1]) / 2 for number in index))


def _steps(size: int, most: int) -> Sequence[int]:
    """Return at most `most` of the numbers from 1 to `size`.

    They are as even on a logarithmic scale as whole numbers can be.
    """
    if size <= most:
        return range(1, size + 1)
    steps = [1]
    left = most - 1
    while left:
        after = steps[-1] * (size / steps[-1]) ** (1 / left)
        steps.append(max(steps[-1] + 1, round(after)))
        left -= 1
    return steps
