"""The role of a latent's norms, and the dtypes that hold it."""

from typing import Literal

import torch

from ...checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint, unquantised_dtype
from ...core.errors import InvalidInput
from ..algebra.target import LatentTarget, Target
from ..families.source import Source
from ..layer.fold_inputs import LatentNorm
from .form import Form

LINEAR = (
    "the latent's norm is linear by a small scale: optimizers at usual rates, float16 and the quantisers of "
    "other tools destroy the output (ModelOpt FP8: KL 3.84, not 0.004); only kvfold distill trains it"
)
NOT_IN_HALF = "float16 cannot hold the small scale of a linearised latent, so the output is bfloat16"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def latent_norm(
    source: Source,
    form: Form | None,
    target: Target,
    wanted: Literal["auto", "fitted", "linear"],
    dtype: str,
) -> LatentNorm | None:
    """Return the role of the norms of the output.

    In the stock class it is `fitted`, unless the user names another or keeps everything: what other tools do
    to an output destroys a linear norm. `wanted` and `dtype` are what the user asks for.

    Returns:
        None where there is no norm, and in kvfold's own code where it is not asked for: that norm's epsilon
        makes it linear at any scale.

    Raises:
        InvalidInput: the user asks for it where there is no such norm, or in a dtype that cannot hold it.
    """
    if source.family.latent and wanted != "linear":
        return None if isinstance(target, LatentTarget) and target.slots == "source" else "fitted"
    no_other = source.family.k_norm is not None or wanted == "linear"  # in kvfold's own code
    if form is None or form.rope == "intact" or (form.remote and no_other):
        if wanted != "auto":
            raise InvalidInput(
                f"--latent-norm {wanted} applies only to latent attention with a norm: --to mla --rope "
                f"decoupled of a source without key norms, linear only with --container stock; leave it out"
            )
        return None
    if wanted == "auto":
        if form.remote:
            return None
        assert isinstance(target, LatentTarget)
        wanted = "linear" if target.slots == "source" else "fitted"
    if wanted == "linear" and dtype == "float16":
        raise InvalidInput(
            "a linear latent norm, which --latent-norm linear and --rank full have, has a scale that --dtype "
            "float16 cannot hold; use --dtype bfloat16, or --latent-norm fitted"
        )
    return wanted


def written_dtypes(
    source: Source, norm: LatentNorm | None, dtype: str, *, dequantize: bool
) -> tuple[dict[str, torch.dtype], list[str]]:
    """Return the dtype that each source tensor is written in, and a notice where it was changed.

    It is the tensor's own, unless the user or the container requires another. Attention and dequantised
    weights of a quantised source take the dtype of most of its unquantised numbers; where other weights stay
    quantised, bfloat16 instead of float32.
    """
    checkpoint = source.checkpoint
    own = {name: checkpoint.spec(name).dtype for name in checkpoint}
    if dtype != "auto":
        return dict.fromkeys(own, _DTYPES[dtype]), []
    if isinstance(checkpoint, QuantisedCheckpoint):
        chosen = unquantised_dtype(checkpoint, own)
        is_too_small = norm == "linear" and chosen == torch.float16
        if is_too_small or (chosen == torch.float32 and not dequantize):
            chosen = torch.bfloat16
        attention = {name for layer in source.folded for name in source.reads(layer)}
        own |= dict.fromkeys(attention | checkpoint.packed.keys(), chosen)
        if not dequantize and not is_too_small:
            return own, []
    if norm == "linear" and torch.float16 in own.values():
        written = {name: torch.bfloat16 if kind == torch.float16 else kind for name, kind in own.items()}
        return written, [NOT_IN_HALF]
    return own, []
