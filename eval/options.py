"""Options of an evaluation. This module imports nothing heavy, because `--help` reads it."""

from dataclasses import dataclass
from pathlib import Path

from ..core.cache_dtypes import cache_dtype
from ..models.load_options import LoadOptions


@dataclass(frozen=True, kw_only=True)
class Options(LoadOptions):
    """Options that load the models and cut the text.

    Attributes:
        window: tokens per window, BOS included, at least 2; None: as many as fit every model, up to 2048.
        bos: start each window with BOS; None: if the tokenizer has one.
        max_windows: read only this many windows from the start, at least 1; None: all.
        batch_size: windows at once, at least 1.
        one_at_a_time: whether models are in memory one after the other; None: when they do not fit together.
        teacher_cache: directory that keeps the teacher's last hidden states, so that it need not run for the
            next student.
        cache_dtype: the number format that the student's cache is stored in, one of
            `kvfold.core.cache_dtypes.CACHE_DTYPES`; None: as the model computes. The teacher and the parent
            keep theirs.
    """

    window: int | None = None
    bos: bool | None = None
    max_windows: int | None = None
    batch_size: int = 8
    one_at_a_time: bool | None = None
    teacher_cache: Path | None = None
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown number format."""
        if self.cache_dtype is not None:
            cache_dtype(self.cache_dtype)
