"""A multimodal checkpoint with a folded text tower, as it is planned and not yet written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.shards import TensorSpec
from ..decide.engine_choice import PlannedOutput
from .assembly import names_in_place, other_specs, whole_config
from .tower import Tower


@dataclass(frozen=True, kw_only=True)
class WholeOutput:
    """The parts of a planned output that engines' rules read.

    Attributes:
        config: its config.json.
        specs: shape and dtype of every tensor, by name.
        latent_norm: role of the latent's norms, as `Plan.latent_norm`.
        tokenizer: the directory of the tokenizer that it gets.
    """

    config: dict[str, Any]
    specs: dict[str, TensorSpec]
    latent_norm: str | None
    tokenizer: Path

    @classmethod
    def of(cls, tower: Tower, plan: PlannedOutput) -> "WholeOutput":
        """Return the whole output around a tower that is planned alone.

        Args:
            tower: the tower of the source.
            plan: its fold.
        """
        part: Mapping[str, TensorSpec] = plan.specs
        specs = {name: part[ours] for name, ours in names_in_place(tower, part).items()}
        return cls(
            config=whole_config(tower, plan.config),
            specs=other_specs(tower) | specs,
            latent_norm=plan.latent_norm,
            tokenizer=tower.directory,
        )
