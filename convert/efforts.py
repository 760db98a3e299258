"""The efforts of a fold: how much text it reads and how many steps of refinement it takes.

`python -m benchmarks.effort` measures them: CPU time against what is lost.
"""

from dataclasses import dataclass
from typing import Literal

EffortName = Literal["quick", "default", "best"]

MEASURED = 8  # layers at most that are folded to measure a choice; the loss of all is estimated from them
RATED = 5  # layers on which a rate of refinement is tried, where a source has more than `MEASURED`


@dataclass(frozen=True, kw_only=True)
class Effort:
    """A row of the table.

    Attributes:
        sequences: calibration sequences.
        steps: of refinement; 0 is the closed form.
        batch: sequences in a step of refinement.
        momentum: of these steps.
        passes: whether steps take all sequences once before they take any again.
        solve: whether the output projection is solved for on the calibration text.
        draws: number of random draws that estimate the weights of tokens' lengths in a latent norm.
        widths: whether rotary widths next to the one that is predicted to lose least, or engines' tables of
            slots, are measured.
    """

    sequences: int
    steps: int
    batch: int
    momentum: float
    passes: bool
    solve: bool
    draws: int
    widths: bool


EFFORTS = {
    "quick": Effort(
        sequences=8, steps=0, batch=2, momentum=0.8, passes=True, solve=True, draws=1, widths=False
    ),
    # Steps of two sequences take a quarter of the time of eight. Their gradients have more noise, so less of
    # it is kept from step to step (docs/notes/refinement.md).
    "default": Effort(
        sequences=48, steps=100, batch=2, momentum=0.8, passes=True, solve=True, draws=1, widths=True
    ),
    "best": Effort(
        sequences=192, steps=300, batch=8, momentum=0.9, passes=False, solve=True, draws=4, widths=True
    ),
}

EFFORTS_EXPLAINED = "; ".join(
    f"{name}: {row.sequences} sequences, "
    + (f"{row.steps} steps of {row.batch} of them" if row.steps else "the closed form")
    for name, row in EFFORTS.items()
)
