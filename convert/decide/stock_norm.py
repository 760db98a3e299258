"""The role of the norms in the stock latent class before a layer is folded, and the dtypes that hold it."""

from typing import Literal

import torch

from ...core.errors import InvalidInput
from ..algebra.target import LatentTarget, Target
from ..calibration.statistics import Statistics
from ..families.source import Source
from .form import Form

LatentNorm = Literal["fitted", "linear", "auto"]
NOT_IN_HALF = "float16 cannot hold the small scale of a linearised latent, so the output is bfloat16"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def first_norm(
    form: Form | None, target: Target, method: str, wanted: LatentNorm | None, statistics: Statistics | None
) -> LatentNorm | None:
    """Return the role of the norms of the output, as far as it is known before a layer is folded.

    Raises:
        InvalidInput: the user asks for it where there is no such norm, or nothing to fit it on.
    """
    if form is None or form.remote:
        if wanted not in (None, "auto"):
            raise InvalidInput(
                f"--latent-norm {wanted} applies only to latent attention in the stock class (--to mla "
                f"--container stock); "
                "leave it out"
            )
        return None
    assert isinstance(target, LatentTarget)
    if wanted == "fitted" and statistics is None:
        return "auto"  # of a plan before its statistics are there
    if statistics is None or wanted == "linear":
        return "linear"
    if wanted == "fitted":
        return "fitted"
    return "linear" if target.slots in {"source", "rule"} else "auto"


def written_dtypes(
    source: Source, norm: LatentNorm | None, dtype: str
) -> tuple[dict[str, torch.dtype], list[str]]:
    """Return the dtype that each source tensor is written in, and a notice where it was changed.

    It is the tensor's own, unless the user or the container requires another.
    """
    own = {name: source.checkpoint.spec(name).dtype for name in source.checkpoint}
    if dtype != "auto":
        return dict.fromkeys(own, _DTYPES[dtype]), []
    if norm == "linear" and torch.float16 in own.values():
        written = {name: torch.bfloat16 if kind == torch.float16 else kind for name, kind in own.items()}
        return written, [NOT_IN_HALF]
    return own, []
