"""The targets that have a place in a whole multimodal checkpoint, and the refusals of the others."""

from typing import Any

from ...checkpoints.quantised.packed_checkpoint import as_stored
from ...core.errors import InvalidInput
from ..families.recognition import complete, configured, latent_obstacle, never_latent
from ..families.rows import FAMILIES
from ..request import FoldRequest
from .text_class import STOCK, decoder_place, holds_other_classes
from .tower import Tower
from .whole_checkpoint import other_specs

RUN_IN = ("transformers",)  # the engine in which latent attention inside a multimodal class was run
_OTHERS = "use --to gqa or --to mqa, or write the text tower alone with --text-only"


def tower_report(tower: Tower, *, in_place: bool, dequantize: bool = False) -> dict[str, Any]:
    """Return a text tower as plain values: its sizes, and for each target why it cannot be; empty: it may."""
    whole = as_stored(tower.whole)
    return {
        "family": FAMILIES[tower.model_type].label,
        "in_place": in_place,
        "bytes": sum(whole.spec(name).nbytes for name in tower.stored),
        "other_bytes": sum(spec.nbytes for spec in other_specs(tower, dequantize=dequantize).values()),
        "targets_in_place": {"gqa": "", "mqa": "", "mla": latent_refusal(tower)},
        "targets_alone": {"gqa": "", "mqa": "", "mla": latent_never(tower)},
    }


def latent_refusal(tower: Tower) -> str:
    """Return why latent attention has no place in a whole checkpoint; empty where the stock class has one."""
    kind = tower.whole.config.get("model_type")
    never = latent_never(tower)
    if FAMILIES[tower.model_type].latent:
        return (
            f"--to mla: the text tower of {kind} has latent attention already, and a narrower latent was not "
            "tried inside a multimodal class; write the tower alone with --text-only"
        )
    if never:
        return (
            f"--to mla: the text tower of {kind} cannot have latent attention, because {never}; use --to gqa"
        )
    if not holds_other_classes(tower.directory, STOCK):
        return (
            f"--to mla: the class of model_type {kind} builds its own text model, in which latent "
            f"attention has no place; {_OTHERS}"
        )
    obstacle = latent_obstacle(complete(FAMILIES[tower.model_type], tower.config), regressed=True)
    if obstacle is None:
        return ""
    reason = obstacle.rpartition("; ")[0] or obstacle
    return f"--to mla: only the stock class has a place in model_type {kind}, and {reason}; {_OTHERS}"


def latent_never(tower: Tower) -> str:
    """Return why no output format of latent attention holds a tower, not even alone; empty where one may."""
    return never_latent(configured(FAMILIES[tower.model_type], tower.config)) or ""


def check_request(request: FoldRequest, tower: Tower) -> None:
    """Refuse what has no place in the whole checkpoint; the tower alone takes everything."""
    if request.text_only:
        return
    if tower.names != tower.stored and not request.dequantize:
        decoder_place(tower.directory)  # by which the output's quantization_config names modules
    if request.to == "mla":
        refusal = latent_refusal(tower)
        if refusal:
            raise InvalidInput(refusal)
        others_asked = [engine for engine in request.engines if engine not in RUN_IN]
        if others_asked:
            raise InvalidInput(
                f"--engine {others_asked[0]}: it is not known whether it runs latent attention inside a "
                f"multimodal class; leave it out for transformers, {_OTHERS}"
            )
        if request.container == "remote" or request.rope == "intact":
            option = "--rope intact" if request.rope == "intact" else "--container remote"
            raise InvalidInput(
                f"{option}: a multimodal class takes no text model with code of its own, only the stock "
                f"class; leave it out, {_OTHERS}"
            )
    if request.dtype != "auto":
        raise InvalidInput(
            f"--dtype {request.dtype} does not apply to a whole multimodal checkpoint, whose other tensors "
            "keep their bytes; leave it out, or add --text-only"
        )


def tower_request(request: FoldRequest) -> FoldRequest:
    """Return the request for the fold of a tower that is put back, from that for the whole checkpoint."""
    changed = {"revision": None, "verify": "none"}
    if request.to == "mla":  # a multimodal class takes no code of ours
        return request.model_copy(update={**changed, "container": "stock", "engines": RUN_IN})
    return request.model_copy(update=changed)
