"""Checks of each stage against both models without their weights, before anything is trained."""

from pathlib import Path
from typing import Any

import torch

from ...checkpoints.card import read_card
from ...checkpoints.directory import check_side_files
from ...core.errors import InvalidInput
from ...models.decoder import Decoder
from ...models.teacher_cache import check_place
from ..losses.layers import comparable
from ..recipe.recipe import SHARED, Recipe, Stage
from ..stages.align import adds, check_inside
from ..stages.cached_teacher import OPTION
from ..stages.objective import check_layers
from ..stages.stream import describe_student
from ..stages.student import rounding
from ..stages.weights import find_trained
from .footprint import skeleton


def check_stages(recipe: Recipe, student: Path, teacher: Path, *, sharded: bool) -> None:
    """Refuse a run with a stage that cannot be trained, before the stages in front of it are trained in vain.

    `sharded` says whether stages of the whole student divide models among processes.

    Raises:
        InvalidInput: the directory of the teacher's cache is another one's, a side file is damaged, the
            tokenizers differ, or, with the name of the stage, something in it cannot be trained.
    """
    _check_cache(recipe, student, teacher)
    for directory in (student, teacher):
        check_side_files(directory)
        read_card(directory)  # the output's card takes its licence
    # It also refuses remote code, which building a model would ask about.
    describe_student(student, teacher, recipe.data.seq_len)
    try:
        models = skeleton(student), skeleton(teacher)
    except InvalidInput:
        models = None  # it cannot be built by layers, or at all; loading reports that before the first stage
    for stage in recipe.stages:
        try:
            if sharded and stage.how == "end_to_end" and recipe.teacher == SHARED:
                raise InvalidInput(
                    "teacher: shared needs whole models in every process; write teacher: null, or use "
                    "--profile ddp"
                )
            if models:
                _check_stage(stage, *models)
        except InvalidInput as mistake:
            name = f"stage {stage.name}: "
            raise InvalidInput(name + str(mistake).removeprefix(name)) from None


def _check_cache(recipe: Recipe, student: Path, teacher: Path) -> None:
    """Refuse to keep the teacher's hidden states where a model is, or will be."""
    if recipe.teacher_cache is None:
        return
    cache = Path(recipe.teacher_cache).expanduser()
    places = {
        "student": student, "teacher": teacher, "output": recipe.output_directory,
        "unfinished output": recipe.working_directory,
    }  # fmt: skip
    for role, place in places.items():
        if cache.resolve().is_relative_to(place.resolve()):
            raise InvalidInput(
                f"{OPTION} {cache} is the directory of the {role} or inside it; name a directory elsewhere"
            )
    check_place(cache, OPTION)


def _check_stage(stage: Stage, student: Any, teacher: Any) -> None:
    trained = find_trained(student, stage)
    if stage.cache_dtype:
        rounding(student, stage).remove()
    if stage.how != "end_to_end":
        ours = Decoder(student)
        adds(ours, Decoder(teacher))
        check_inside(stage, trained, ours)
        return
    if stage.of_layers:
        check_layers(len(Decoder(student)), len(Decoder(teacher)))
    for name in stage.of_layers:
        if name.startswith("hidden"):
            sizes = (model.config.get_text_config().hidden_size for model in (student, teacher))
            comparable(name, *(torch.zeros(1, size) for size in sizes))
