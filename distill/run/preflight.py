"""What can be known to fail before anything is trained.

Each stage of a run, held against both models without their weights.
"""

from pathlib import Path
from typing import Any

import torch

from ...core.errors import InvalidInput
from ...models.decoder import Decoder
from ..losses import LOSSES
from ..losses.objective import check_layers
from ..recipe.recipe import Recipe, Stage
from ..stages.align import adds, check_inside
from ..stages.stream import describe_student
from ..stages.teacher import check_whole
from ..stages.weights import find_trained
from .footprint import skeleton


def check_stages(recipe: Recipe, student: Path, teacher: Path, *, sharded: bool) -> None:
    """Refuse a run of which some stage, however late, cannot be trained: found out there, the stages before
    it would be lost.

    Args:
        recipe: the run.
        student: where the checkpoint to be trained lies.
        teacher: where the model to learn from lies.
        sharded: whether stages of the whole student divide models among processes.

    Raises:
        InvalidInput: as of `stream.describe_student`; or, with the name of the stage, as of
        `teacher.check_whole`,
            `weights.find_trained`, `align.adds`, `align.check_inside`, `objective.check_layers` and the
            losses themselves.
    """
    describe_student(
        student, teacher, recipe.data.seq_len
    )  # refuses code of strangers too, which building would ask about
    try:
        models = skeleton(student), skeleton(teacher)
    except InvalidInput:
        models = None  # not to be had in layers, or not at all, which loading it tells before the first stage
    for stage in recipe.stages:
        try:
            check_whole(recipe, sharded and stage.how == "end_to_end")
            if models:
                _check_stage(stage, *models)
        except InvalidInput as mistake:
            name = f"stage {stage.name}: "
            raise InvalidInput(name + str(mistake).removeprefix(name)) from None


def _check_stage(stage: Stage, student: Any, teacher: Any) -> None:
    trained = find_trained(student, stage)
    if stage.how != "end_to_end":
        ours = Decoder(student)
        adds(ours, Decoder(teacher))
        check_inside(stage, trained, ours)
        return
    compared = [LOSSES[name] for name in stage.learnt if LOSSES[name].reads != "logits"]
    if compared:
        check_layers(len(Decoder(student)), len(Decoder(teacher)))
    one, other = (torch.zeros(1, model.config.get_text_config().hidden_size) for model in (student, teacher))
    for loss in compared:
        if loss.reads == "hidden":
            loss(one, other)
