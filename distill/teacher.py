"""The model that the student learns from."""

from pathlib import Path

import torch

from ..convert.errors import InvalidInput
from ..eval.head import check_head
from ..eval.models import Loaded, check_comparable, load
from ..eval.options import Options


def load_teacher(directory: Path, dtype: str, device: torch.device, student: Loaded) -> Loaded:
    """A frozen model in evaluation mode, in `float32` or `bfloat16`.

    Raises:
        InvalidInput: it cannot be loaded whole, its token ids do not mean what the student's mean, or its logits are no linear
            function of its last hidden states.
    """
    teacher = load(directory, Options(device="cuda" if device.type == "cuda" else "cpu", dtype=dtype))
    check_comparable(student, teacher, "")
    if teacher.vocabulary != student.vocabulary:
        raise InvalidInput(
            f"the teacher {directory} predicts {teacher.vocabulary} token ids, the student {student.vocabulary}; "
            "they must be as many"
        )
    check_head(teacher, torch.arange(4)[None])
    teacher.model.to(device).requires_grad_(False)
    return teacher
