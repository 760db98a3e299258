"""What a whole fold loses on the calibration text that took no part in its fit.

Predicted losses are those of layers measured alone, each behind the source's layers, and added up. Together
layers lose up to several times that, which one pass of source and fold shows.
"""

import math
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint
from ...core.console import notice
from ...core.errors import InvalidInput
from ...core.memory import free_bytes
from ...models.causal_lm import load_model
from ..calibration.study import whole_model
from ..decide.plan import Plan
from ..methods.refinement import HELD_BACK

_MOST = 8  # sequences
_DISTRIBUTIONS = 4  # of one sequence that are in memory at once


@torch.inference_mode()
def measured_kl(plan: Plan, directory: Path) -> dict[str, Any] | None:
    """Return the KL of a written fold from its source, for its record.

    It is read on the last sequences of the calibration text, which are held back from the fit.

    Returns:
        `kl`, mean of KL(source || fold) in nats per token; `sequences` and `length`, what it was read on.
        None without a text, where both models do not fit into memory, or where the source is quantised.
    """
    checkpoint, statistics = plan.source.checkpoint, plan.statistics
    if statistics is None or isinstance(checkpoint, QuantisedCheckpoint):
        return None
    ids_BT = statistics.ids_BT[-min(_MOST, max(1, len(statistics.ids_BT) // HELD_BACK)) :]
    specs = [*map(checkpoint.spec, checkpoint), *plan.specs.values()]
    weights = sum(math.prod(spec.shape) for spec in specs)
    logits = _DISTRIBUTIONS * ids_BT.shape[1] * int(plan.source.config["vocab_size"])
    if torch.float32.itemsize * (weights + logits) > free_bytes():
        return None
    try:
        fold = load_model(directory)
    except InvalidInput as error:  # the output is whole, and must not be lost
        notice(f"what the fold loses could not be measured: {error}")
        return None
    source = whole_model(checkpoint)
    found = []
    for ids_T in ids_BT:
        wanted_TV, given_TV = (
            model(input_ids=ids_T[None].to(model.device)).logits[0].float().log_softmax(-1).cpu()
            for model in (source, fold)
        )
        found.append(float((wanted_TV.exp() * (wanted_TV - given_TV)).sum(-1).mean()))
    return {"kl": sum(found) / len(found), "sequences": len(found), "length": ids_BT.shape[1]}
