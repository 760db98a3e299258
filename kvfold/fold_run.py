"""The execution of a fold request, for the Python API and the command."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core.console import is_first, listening, notice
from .core.errors import InvalidInput
from .core.untrusted import shorten
from .results import Folded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .convert.decide.fold_cost import FoldCost
    from .convert.request import GQA, MLA, MQA, FoldRequest


def fold_loaded(
    source: PreTrainedModel,
    target: GQA | MQA | MLA,
    tokenizer: PreTrainedTokenizerBase | None,
    **options: Any,
) -> PreTrainedModel:
    """Fold a loaded model through a temporary directory; arguments are those of `kvfold.fold`.

    Raises:
        InvalidInput: the source cannot be folded like this, or a value is unusable.
    """
    from .convert.request import request_of

    if tokenizer is None or not hasattr(source, "save_pretrained"):
        raise InvalidInput(
            f"the source is of type {type(source).__name__}; it should be a directory, a Hub id, or a loaded "
            f"transformers model with tokenizer=..."
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise InvalidInput(
            f"tokenizer is {shorten(tokenizer)}; it should be a loaded tokenizer, as "
            f"AutoTokenizer.from_pretrained returns it"
        )
    with tempfile.TemporaryDirectory(prefix="kvfold-") as work:
        directory = Path(work) / "model"
        source.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        folded = carry_out(request_of(directory, target, out=Path(work) / "folded", **options))
        dtype = str(source.dtype).removeprefix("torch.")
        model: PreTrainedModel = folded.load(dtype=dtype, device="cpu")
        return model.to(source.device)


def carry_out(request: FoldRequest) -> Folded:
    """Fold what a request names. Of several processes each does its share, and all get the result.

    Raises:
        InvalidInput: the source cannot be folded like this, or a value is unusable.
    """
    from .convert.towers.tower import tower_of
    from .core.hub import resolve
    from .tower_run import fold_tower

    directory = resolve(request.model, request.revision)
    tower = tower_of(directory, request.model, text_only=request.text_only)
    return _fold(request) if tower is None else fold_tower(request, tower, _fold)


def dry_run(request: FoldRequest) -> tuple[dict[str, Any], FoldCost] | None:
    """Plan the fold of what a request names; nothing is written.

    Returns:
        The plan as plain values and its predicted cost, in the first of several processes; else None.

    Raises:
        InvalidInput: the source cannot be folded like this, or a value is unusable.
    """
    from .convert.decide.fold_cost import cost_of
    from .convert.settle.preparation import prepare
    from .convert.towers.tower import tower_of
    from .core.hub import resolve
    from .tower_run import plan_tower

    directory = resolve(request.model, request.revision)
    tower = tower_of(directory, request.model, text_only=request.text_only)
    if tower is not None:
        return plan_tower(request, tower)
    plan = prepare(request, dry_run=True)
    return (plan.to_dict(), cost_of(plan)) if is_first() else None


def _fold(request: FoldRequest) -> Folded:
    from .convert.settle.preparation import output_of, prepare
    from .convert.write.rewrite import begun, rewrite
    from .engines.verify import verify_fold

    with listening() as heard:
        plan = prepare(request, begun=begun)
        out = output_of(request, plan)
        for text in plan.notices:
            notice(text)
        record = rewrite(plan, out)
        for text in record["notices"]:
            if text not in plan.notices:
                notice(text)
        verification = verify_fold(out, plan.engines, request.verify) if is_first() else None
        for check in verification.checks if verification else ():
            notice(f"{check.name}: {check.detail}")
    return Folded(
        directory=out,
        record=record,
        request=plan.request,
        notices=tuple(heard.notices),
        verification=verification,
    )
