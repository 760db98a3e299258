"""Options of loading a model. This module imports nothing heavy, because command files read it."""

from dataclasses import dataclass
from pathlib import Path

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
DEVICE_MAPS = ("one", "auto")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The device and precision that a model is loaded with.

    Attributes:
        device: one of `DEVICES`; `auto` is cuda where there is one.
        dtype: one of `DTYPES`; `auto` is the checkpoint's own on cuda and float32 on a CPU, where half
            precision is slow.
        trust_remote_code: whether Python files of the checkpoints may run.
        device_map: `one` puts a model on one device, whole; `auto` fills the accelerators, then memory, then
            the disk.
        offload_dir: the directory for weights that `auto` puts on the disk in another dtype than the
            checkpoint's.
        cpu_memory: bytes of weights that `auto` puts in memory; None: as many as fit.
    """

    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    device_map: str = "one"
    offload_dir: Path | None = None
    cpu_memory: int | None = None
