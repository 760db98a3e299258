"""What an evaluation may be asked for. No heavy import here: `--help` goes through this module."""

from dataclasses import dataclass
from pathlib import Path

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
DEVICE_MAPS = ("one", "auto")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to load and how to cut.

    Attributes:
        window: tokens of a window, BOS included, at least 2; None: as much as every model takes, up to 2048.
        bos: whether each window starts with BOS; None: if the tokenizer has one.
        max_windows: read only so many windows from the start, at least 1; None: all.
        batch_size: windows at once, at least 1.
        device: one of `DEVICES`; `auto` is cuda where there is one.
        dtype: one of `DTYPES`; `auto` is the checkpoint's own on cuda and float32 on a CPU, where half
            precision is slow.
        trust_remote_code: whether Python files of the checkpoints may run.
        device_map: `one` puts a model on one device, whole; `auto` fills the accelerators, then memory, then
            the disk.
        offload_dir: where weights go that must lie on the disk in another form than the checkpoint's.
        cpu_memory: bytes of weights that `auto` puts in memory; None: as many as fit.
        one_at_a_time: whether models are in memory one after the other; None: when they do not fit together.
        teacher_cache: where the teacher's last hidden states are kept, so that it need not run for the next
            student.
    """

    window: int | None = None
    bos: bool | None = None
    max_windows: int | None = None
    batch_size: int = 8
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    device_map: str = "one"
    offload_dir: Path | None = None
    cpu_memory: int | None = None
    one_at_a_time: bool | None = None
    teacher_cache: Path | None = None
