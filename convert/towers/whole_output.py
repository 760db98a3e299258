"""A multimodal checkpoint with a folded text tower, as it is planned and not yet written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.shards import TensorSpec
from ..decide.engine_choice import PlannedOutput
from .tower import Tower
from .whole_checkpoint import names_in_place, other_specs, whole_config


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """A text tower with what stays around it, whatever the tower becomes.

    Attributes:
        tower: the tower of the source.
        specs: shape and dtype of the tensors that are not the tower's, by name.
    """

    tower: Tower
    specs: dict[str, TensorSpec]

    @classmethod
    def of(cls, tower: Tower) -> "Surroundings":
        """Return what is around a tower."""
        return cls(tower=tower, specs=other_specs(tower))


@dataclass(frozen=True, kw_only=True)
class WholeOutput:
    """The parts of a planned output that engines' rules read.

    Attributes:
        config: its config.json.
        read_specs: shape and dtype of every tensor as it is read, by name; around the tower as it is stored.
        scheme: of its quantised weights, as `Plan.scheme`.
        latent_norm: role of the latent's norms, as `Plan.latent_norm`.
        tokenizer: the directory of the tokenizer that it gets.
    """

    config: dict[str, Any]
    read_specs: dict[str, TensorSpec]
    scheme: str
    latent_norm: str | None
    tokenizer: Path

    @classmethod
    def of(cls, around: Surroundings, plan: PlannedOutput) -> "WholeOutput":
        """Return the whole output around a tower that is planned alone.

        Args:
            around: the tower of the source, and its surroundings.
            plan: its fold.
        """
        tower = around.tower
        part: Mapping[str, TensorSpec] = plan.read_specs
        specs = {name: part[ours] for name, ours in names_in_place(tower, part).items()}
        return cls(
            config=whole_config(tower, plan.config),
            read_specs=around.specs | specs,
            scheme=plan.scheme,
            latent_norm=plan.latent_norm,
            tokenizer=tower.directory,
        )
