"""What an evaluation may be asked for. No heavy import here: `--help` goes through this module."""

from dataclasses import dataclass

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to load and how to cut.

    Attributes:
        window: tokens of a window, BOS included, at least 2; None: as much as every model takes, up to 2048.
        bos: whether each window starts with BOS; None: if the tokenizer has one.
        max_windows: read only so many windows from the start, at least 1; None: all.
        batch_size: windows at once, at least 1.
        device: one of `DEVICES`; `auto` is cuda where there is one.
        dtype: one of `DTYPES`; `auto` is the checkpoint's own on cuda and float32 on a CPU, where half precision is slow.
        trust_remote_code: whether Python files of the checkpoints may run.
    """

    window: int | None = None
    bos: bool | None = None
    max_windows: int | None = None
    batch_size: int = 8
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
