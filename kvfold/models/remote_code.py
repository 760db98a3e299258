"""Code that travels next to the weights of a remote output, and outputs that carry it.

A remote output is loaded by kvfold's own classes, which are the same files: no file of the output runs.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from . import shipped

FILES = (
    "configuration_kvfold.py",
    "modeling_kvfold.py",
    "attention_kvfold.py",
    "decoding_kvfold.py",
    "kernels_kvfold.py",
    "layers_kvfold.py",
)
MODEL_TYPE = "kvfold"
ARCHITECTURE = "KvfoldForCausalLM"
AUTO_MAP = {
    "AutoConfig": "configuration_kvfold.KvfoldConfig",
    "AutoModel": "modeling_kvfold.KvfoldModel",
    "AutoModelForCausalLM": f"modeling_kvfold.{ARCHITECTURE}",
}
HERE = Path(shipped.__path__[0])  # the directory of the files


def ship(source: Path, out: Path) -> None:
    """Copy the code of one output into another that is made from it.

    Args:
        source: the output; nothing is copied where it has no code.
        out: the directory that gets the files.
    """
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def is_remote(directory: Path) -> bool:
    """Return whether a checkpoint is a remote output, by the model type in its config.json."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return bool(config.get("model_type") == MODEL_TYPE)
    except (OSError, ValueError, AttributeError):
        return False


def source_config(directory: Path) -> Any:
    """Return the stock configuration of the model that a remote output was made from.

    Its fields are read from the output's config.json.
    """
    from transformers import CONFIG_MAPPING

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kind = config["kvfold"]["source_model_type"]
    return CONFIG_MAPPING[kind](vocab_size=config["vocab_size"])


def carries_own_code(directory: Path) -> bool:
    """Return whether the code files of a checkpoint are, byte for byte, those of this kvfold.

    Then kvfold's own classes can stand for them, and no file of the checkpoint needs to run.
    """
    return is_remote(directory) and all(_digest(directory / name) == _digest(HERE / name) for name in FILES)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
