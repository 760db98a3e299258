"""The recipe of a fold that is given without one, and the stage that such recipes have."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoints.other_forms import without_config
from ...checkpoints.record import is_folded, read_record
from ...core.errors import InvalidInput
from ...core.untrusted import printable
from .recipe import default_windows

if TYPE_CHECKING:
    from ...checkpoints.directory import Checkpoint

# Default folds got back 25 to 38 % of what they had lost on other text (docs/results/distillation.md).
TOKENS = 200_000
# Tokens of a window where the teacher did not write the fold's calibration text, as for `convert --length`.
WINDOW = 256
# Peak learning rates by the number of weights: the larger a model, the smaller its steps. Higher rates get
# back more of a large loss, but make a fold that has lost little worse (docs/distill.md).
RATES = ((1e9, 1e-4), (3e9, 5e-5), (float("inf"), 2e-5))


def default_recipe(fold: Path) -> dict[str, Any]:
    """Return the recipe of a fold: the keys of a recipe file, for KL on text that its teacher writes.

    The teacher is the source that the fold's kvfold.json names. The output stands next to the fold, which is
    an output of `kvfold convert`, or of a distillation of one.

    Raises:
        InvalidInput: kvfold did not fold this directory, or its record is damaged.

    Example:
        >>> default_recipe(work / "folded")["data"]
        {'source': 'self', 'seq_len': 32, 'packing': 'documents'}
    """
    if (fold / "adapter_config.json").is_file() and not (fold / "config.json").is_file():
        raise InvalidInput(without_config(fold))
    record = read_record(fold)
    if record is None or not is_folded(fold):
        what, remedy = "a directory without a checkpoint", "name an output of kvfold convert or"
        if (fold / "config.json").is_file():
            what, remedy = "a model that is not folded", "convert it first with kvfold convert, or name"
        raise InvalidInput(f"{printable(fold)} is {what}; {remedy} a recipe file")
    from ...checkpoints.directory import Checkpoint, read_config

    place = fold if fold.name not in ("", "..") else fold.resolve()
    # As many tokens as the source wrote per sequence for the fold, if it did.
    calibration = record.get("calibration") or {}
    window = int(calibration.get("length", 0)) if calibration.get("text") == "self" else 0
    if window < 2:
        positions = read_config(fold).get("max_position_embeddings")
        window = min(WINDOW, positions) if isinstance(positions, int) and positions >= 2 else WINDOW
    stage = default_stage(weights_of(Checkpoint(fold, packed=True)), TOKENS, window)
    # Layers without attention carry a document's end into the next document.
    packing = "stream" if "layers" in record.get("cache", {}) else "documents"
    if "cache_dtype" in record:
        stage["cache_dtype"] = record["cache_dtype"]["name"]
    return {
        "schema": 1,
        "student": str(fold),
        "output": str(place.with_name(f"{place.name}-distilled")),
        "data": {"source": "self", "seq_len": window, "packing": packing},
        "stages": [stage],
        "save": {"every": default_save(TOKENS, window)},
    }


def default_save(tokens: int, window: int) -> int:
    """Return the optimizer steps between two saves: a quarter of the stage, at most 500."""
    return max(1, min(500, default_steps(tokens, window) // 4))


def default_steps(tokens: int, window: int) -> int:
    """Return the optimizer steps of a stage whose batch is left to kvfold."""
    return math.ceil(tokens / (default_windows(tokens, window) * window))


def default_stage(weights: int, tokens: int, window: int) -> dict[str, Any]:
    """Return a stage of forward KL for a model of so many weights, whose batch is left to kvfold.

    Example:
        >>> default_stage(135_000_000, 100_000, 256)["lr"]
        0.0001
    """
    return {
        "name": "kl",
        "tokens": tokens,
        "losses": {"kl": 1.0},
        "micro_batch": max(1, 4096 // window),
        "lr": default_rate(weights),
    }


def default_rate(weights: int) -> float:
    """Return the peak learning rate for a model of so many weights."""
    return next(rate for most, rate in RATES if weights <= most)


def weights_of(checkpoint: "Checkpoint") -> int:
    """Return the number of stored numbers of a checkpoint."""
    specs = [checkpoint.spec(name) for name in checkpoint]
    return sum(spec.nbytes // spec.dtype.itemsize for spec in specs)
