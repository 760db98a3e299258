"""A whole evaluation in this process: load, cut, score, summarise."""

import math
from pathlib import Path

import torch
import transformers
from torch import Tensor

from .. import __version__
from .cache import measure
from .corpus import Text
from .fidelity import summarise
from .models import Loaded, check_comparable, load
from .options import Options
from .perplexity import estimate, paired_difference, recovered_share
from .report import Measured, Protocol, Result
from .scores import Scores, score
from .windows import Windows, cut, window_length


def evaluate(student: Path, teacher: Path | None, text: Text, options: Options, parent: Path | None = None) -> Result:
    """Measure a checkpoint, and where given its teacher and its folded parent, on the same windows of one text.

    Args:
        student: the checkpoint.
        teacher: the checkpoint it is compared with; None: only its own numbers.
        text: what is read.
        options: how to load and how to cut.
        parent: the converted checkpoint that `student` was distilled from, needed for the recovered share.

    Raises:
        InvalidInput: a checkpoint cannot be loaded, two cannot be compared, the text does not suit the windows, or a model's
            logits are not finite.
    """
    paths = {"student": student, "teacher": teacher, "parent": parent}
    models = {role: load(path, options) for role, path in paths.items() if path is not None}
    for other in list(models.values())[1:]:
        check_comparable(models["student"], other, text.joined)
    length = window_length(options.window, list(models.values()))
    windows = cut(text, models["student"], length, options)
    return _summary(models, windows, text, score(models, windows.ids_NW, options.batch_size))


def _summary(models: dict[str, Loaded], windows: Windows, text: Text, scores: Scores) -> Result:
    measured = {role: _measured(loaded, scores.nll[role], windows.ids_NW[0]) for role, loaded in models.items()}
    student, teacher, parent = (measured.get(role) for role in ("student", "teacher", "parent"))
    assert student is not None
    count, length = windows.ids_NW.shape
    fidelity = summarise(scores.kl_NT, scores.same_NT) if scores.kl_NT is not None and scores.same_NT is not None else None
    return Result(
        schema=1,
        protocol=Protocol(windows.name, text.sha256, length, count, scores.nll["student"].numel()),
        student=student,
        teacher=teacher,
        parent=parent,
        nll_difference=paired_difference(student.window_nll, teacher.window_nll) if teacher else None,
        fidelity=fidelity,
        cache_ratio=student.cache.elements_per_token / teacher.cache.elements_per_token if teacher else None,
        recovered_share=recovered_share(
            student.window_nll, teacher.window_nll if teacher else None, parent.window_nll if parent else None
        ),
        device=str(models["student"].model.device),
        versions={"kvfold": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    )


def _measured(loaded: Loaded, nll_NT: Tensor, ids_W: Tensor) -> Measured:
    window_nll = tuple(nll_NT.mean(1).tolist())
    nll = estimate(window_nll)
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return Measured(str(loaded.path), dtype, math.exp(nll.mean), nll, window_nll, measure(loaded, ids_W))
