"""The data that the fold of a layer depends on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..algebra.target import LatentTarget, Target
from ..calibration.capacity import default_jobs
from ..calibration.statistics import Statistics
from ..efforts import Effort
from ..families.source import Source
from ..formats.container import Container
from ..methods.latent import Band
from ..request import FoldRequest

LatentNorm = Literal["fitted", "linear"]


@dataclass(frozen=True, kw_only=True)
class Folding:
    """The part of a plan that decides the numbers of its layers.

    Attributes:
        source: the checkpoint that is read.
        target: the attention that it becomes.
        method: name of the method that folds the layers.
        container: the output format.
        bands: the rotary slots of MLA.
        statistics: of the source on calibration tokens; None where only its weights are used.
        refine: number of refinement steps of each layer, where there are statistics.
        effort: sequences in each of these steps, and draws for the weights of lengths.
        request: what the user asked for, with the choices that were made for them.
        latent_norm: role of the latent's norms: `fitted`, they are norms, and the latent is chosen to suit
            them; `linear`, its scale makes them linear in the stock class. None in other formats, and in
            kvfold's own code where its epsilon makes them linear.
        formats: number formats of the cache in which the losses of layers are measured too.
        quarters: times that the largest rate of refinement is divided by four, by layer (settle/rates.py);
            other layers try rates.
        inputs: second moments (E, E) of the inputs that layers have behind others that were changed, by
            layer, for rules that read these (settle/in_order.py); empty: the source's are taken.
    """

    source: Source
    target: Target
    method: str
    container: Container
    bands: tuple[Band, ...]
    statistics: Statistics | None
    refine: int
    effort: Effort
    request: FoldRequest
    latent_norm: LatentNorm | None = None
    formats: tuple[str, ...] = ()
    quarters: Mapping[int, int] = field(default_factory=dict)
    inputs: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def solves(self) -> bool:
        """Return whether output projections are solved for; a closed form does so if it is its effort."""
        return self.effort.solve and (self.refine > 0 or self.effort.steps == 0)

    @property
    def fitted_ranks(self) -> dict[str, int | None]:
        """Return widths of a latent that is fitted to tokens, as `capacity.fold_bytes` takes them."""
        rank = self.target.kv_lora_rank if isinstance(self.target, LatentTarget) else None
        is_stored = self.request.cache_dtype != "bfloat16"
        return {
            "levelled": rank if self.latent_norm == "fitted" else None,
            "stored": rank if is_stored else None,
        }

    @property
    def jobs(self) -> int:
        """Return how many layers are folded at once, each on one thread."""
        return self.request.jobs or default_jobs(self.source, self.statistics, **self.fitted_ranks)

    @property
    def folds_biases(self) -> bool:
        """Return whether biases must go into weights, because the output has no place for them."""
        return bool(self.source.biases) and not self.container.holds_biases
