"""Options of loading a model. This module imports nothing heavy, because command files read it."""

from typing import Annotated, Literal

from ..core.command_options import Option
from ..core.option_types import Bytes, Place
from ..core.settings import Settings

DEVICES = ("auto", "cpu", "cuda")


class LoadOptions(Settings):
    """The device and precision that a model is loaded with; `kvfold.eval.options.Options` explains all."""

    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    """Allow Python files of the checkpoints to run."""
    device_map: Literal["one", "auto"] = "one"
    """auto: spread a model that does not fit one device over all devices, then memory, then disk."""
    offload_dir: Annotated[Place, Option(metavar="DIR")] | None = None
    """With --device-map auto: directory for weights that cannot be read from the checkpoint directly."""
    cpu_memory: Bytes | None = None
    """With --device-map auto: most memory for weights. Default: as much as is free."""
