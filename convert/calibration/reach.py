"""The reach of a source's predictions: the length that its files name, and the one that its own text shows.

A model can have more positions than it was trained on. Beyond those its text falls apart: on text that it
writes itself, its uncertainty jumps, where it otherwise rises slowly or falls. Statistics of such positions
are of inputs that no use of the model should have.

Legend: B sequences, T tokens.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.untrusted import read_json
from ..families.source import Source

LENGTH = 512  # tokens of a calibration sequence where nothing says less
FIRST = 32  # positions that are never doubted
# How much the mean entropy rises between spans, each twice as long as the one before, where predictions break
# down: nats, a multiple of the largest rise before, and standard errors on top.
RISE, TIMES, ERRORS = 0.1, 2.0, 2.0


def default_length(source: Source) -> int:
    """Return the tokens of a calibration sequence by default: `LENGTH`, or what a source was trained on.

    Args:
        source: the checkpoint. A scaled rotation names the positions of the first training; a tokenizer may
            name a length of its own.
    """
    scaled = source.config.get("rope_parameters") or source.config.get("rope_scaling") or {}
    stated: list[Any] = [
        source.positions,
        source.config.get("original_max_position_embeddings"),
        scaled.get("original_max_position_embeddings") if isinstance(scaled, dict) else None,
        _stated_by_tokenizer(source.checkpoint.directory),
    ]
    lengths = (int(value) for value in stated if isinstance(value, int | float) and value >= FIRST)
    return max(2, min(LENGTH, source.positions, *lengths))


def _stated_by_tokenizer(directory: Path) -> Any:
    file = directory / "tokenizer_config.json"
    return read_json(file).get("model_max_length") if file.is_file() else None


def reach(entropy_BT: Tensor) -> int | None:
    """Return the first position from which on a source's predictions break down, or None.

    Positions are compared in spans [L, 2L) with L a power of two. What a text costs per token changes slowly
    from one to the next, and mostly at its beginning; a jump at a later one is no property of text.

    Args:
        entropy_BT: of the prediction before every token of text that the source wrote, nats.

    Example:
        >>> entropy_BT = torch.ones(16, 256) + torch.rand(16, 256)
        >>> entropy_BT[:, 64:] += 2
        >>> reach(entropy_BT)
        64
    """
    length, largest, start = entropy_BT.shape[1], 0.0, FIRST // 4
    while start * 3 // 2 <= length:
        before_B = entropy_BT[:, start // 2 : start].mean(1)
        after_B = entropy_BT[:, start : 2 * start].mean(1)
        rise_B = after_B - before_B
        error = float(rise_B.std() / len(rise_B) ** 0.5) if len(rise_B) > 1 else float("inf")
        rise = float(rise_B.mean())
        if start >= FIRST and rise > max(RISE, TIMES * largest) + ERRORS * error:
            return start
        largest, start = max(largest, rise), 2 * start
    return None
