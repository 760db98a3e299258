"""A text tower and the targets that it can become, as plain values for plans."""

from typing import Any

from ...checkpoints.quantised.packed_checkpoint import as_stored
from ..families.rows import FAMILIES
from .tower import Tower
from .tower_targets import latent_never, latent_refusal
from .whole_checkpoint import other_specs


def tower_report(tower: Tower, *, in_place: bool, dequantize: bool = False) -> dict[str, Any]:
    """Return a text tower as plain values: its sizes, and for each target why it cannot be; empty: it may.

    Args:
        tower: the tower.
        in_place: whether it stays in the whole checkpoint.
        dequantize: whether the output is unquantised.
    """
    whole = as_stored(tower.whole)
    size = sum(whole.spec(name).nbytes for name in tower.stored)
    return {
        "family": FAMILIES[tower.model_type].label,
        "in_place": in_place,
        "bytes": size,
        "other_bytes": sum(spec.nbytes for spec in other_specs(tower, dequantize=dequantize).values()),
        "targets_in_place": {"gqa": "", "mqa": "", "mla": latent_refusal(tower)},
        "targets_alone": {"gqa": "", "mqa": "", "mla": latent_never(tower)},
    }
