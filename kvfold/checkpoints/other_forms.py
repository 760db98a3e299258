"""Directories that hold a model in another form than a checkpoint with a config.json."""

from itertools import islice
from pathlib import Path

from ..core.untrusted import printable

_SHOWN = 3  # directories that a sentence names
_GGUF = "kvfold reads safetensors; give the directory of the checkpoint that they were made from"


def without_config(directory: Path) -> str:
    """Return the sentence for a directory without a config.json: what it holds instead, and what to give.

    It tells an adapter of PEFT, files in GGUF, and a directory whose folders are checkpoints, such as the
    output of a training run.

    Args:
        directory: the directory, which may be missing; nothing in it is opened.

    Example:
        >>> from kvfold.checkpoints.other_forms import without_config
        >>> without_config(work / "nothing").partition("; ")[2]
        'give the directory of a Hugging Face checkpoint'
    """
    if (directory / "adapter_config.json").is_file():
        return (
            f"{directory} holds an adapter, not a model; merge it into its base model "
            "(merge_and_unload and save_pretrained of PEFT) and give the directory of the result"
        )
    files = sorted(printable(file.name) for file in islice(directory.glob("*.gguf"), _SHOWN))
    if files:
        return f"{directory} has no config.json but {', '.join(files)}; {_GGUF}"
    inner = sorted(printable(file.parent) for file in islice(directory.glob("*/config.json"), _SHOWN))
    if inner:
        return f"{directory} has no config.json; give a directory in it that has: {', '.join(inner)}"
    return f"{directory} has no config.json; give the directory of a Hugging Face checkpoint"
