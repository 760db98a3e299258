"""Code that travels next to the weights of a remote output, and outputs that carry it.

A remote output is loaded by kvfold's own classes, which are the same files: no file of the output runs.
"""

import hashlib
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.directory import read_config
from ..core.errors import InvalidInput
from ..core.files import whole_file
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
FORMS = ("decoupled", "intact")
GATES = (None, "gate_proj", "g_proj")
ARCHITECTURE = "KvfoldForCausalLM"
AUTO_MAP = {
    "AutoConfig": "configuration_kvfold.KvfoldConfig",
    "AutoModel": "modeling_kvfold.KvfoldModel",
    "AutoModelForCausalLM": f"modeling_kvfold.{ARCHITECTURE}",
}
_LARGEST = 2**20  # bytes of a file of kvfold's code
HERE = Path(shipped.__path__[0])  # the directory of the files
# SHA-256 of the files of earlier versions, from 0.1.0 on; new ones go to the end. They compute the same with
# this version's classes, which stand for them; a test loads an output that has them.
EARLIER: dict[str, tuple[str, ...]] = {
    "decoding_kvfold.py": (
        "e476aeb3547baac5220d17a4d9e9eff8bdc83e4f4c139839ed651f9b7fae9b98",
        "5d400a839401b20c33508e2930bdd76c510fd60c0c1d00a0f19d37a95085ac65",
    )
}


def ship(source: Path, out: Path) -> None:
    """Write the code of one output into another that is made from it.

    Code of an earlier kvfold becomes this version's, which newer releases of transformers run too.

    Args:
        source: the output; nothing is written where it has no code.
        out: the directory that gets the files.
    """
    place = HERE if carries_own_code(source) else source
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(place / name, out / name)


def renew(directory: Path) -> list[str]:
    """Replace the code of an earlier kvfold in an output with this version's.

    Each file is replaced whole or not at all.

    Returns:
        The names of the files that were replaced.

    Raises:
        InvalidInput: it is no remote output, a file of its code is missing or not kvfold's, or one that would
            be replaced is a link. Nothing was replaced.
        OSError: the directory cannot be written.
    """
    if read_config(directory).get("model_type") != MODEL_TYPE:
        raise InvalidInput(f"{directory} brings no code of kvfold's, so there is none to renew")
    for name in FILES:
        if not _is_own(directory, name):
            state = "not that of any kvfold" if (directory / name).exists() else "missing"
            raise InvalidInput(
                f"{directory / name} is {state}, so nothing was replaced; fold the source again"
            )
    names = [name for name in FILES if _digest(directory / name) in EARLIER.get(name, ())]
    for name in names:
        if (directory / name).is_symlink():
            raise InvalidInput(
                f"{directory / name} is a link, as in a cache of downloads; renew the code of a copy (cp -rL)"
            )
    for name in names:
        with whole_file(directory / name, replace=True) as temporary:
            shutil.copyfile(HERE / name, temporary)
    return names


def is_remote(directory: Path) -> bool:
    """Return whether a checkpoint is a remote output, by the model type in its config.json."""
    try:
        return bool(read_config(directory).get("model_type") == MODEL_TYPE)
    except InvalidInput:  # loading it gives the full error
        return False


def check_form(directory: Path, config: Mapping[str, Any]) -> None:
    """Check what a remote output's config.json says of its form, which its weights do not reveal.

    Raises:
        InvalidInput: a field is missing, or has no meaning.
    """
    width = config.get("qk_rope_head_dim")
    try:
        ours, layers = config["kvfold"], config.get("num_hidden_layers", 1)
        tables = ours["frequencies"]
        is_sound = (
            ours["form"] in FORMS
            and ours.get("gate") in GATES
            and len({len(table) for table in tables}) == 1
            and all(math.isfinite(number) for table in tables for number in table)
            and (ours["form"] == "intact" or not isinstance(width, int) or 2 * len(tables[0]) == width)
            and all(number in range(layers) for number in ours.get("layers") or ())
            and all(number in range(len(tables)) for number in ours.get("tables", ()))
        )
    except (TypeError, ValueError, LookupError, AttributeError):
        is_sound = False
    if not is_sound:
        raise InvalidInput(
            f"{directory} has a damaged `kvfold` in config.json; copy config.json from where the checkpoint "
            "came from, or convert the source again"
        )


def source_config(directory: Path) -> Any:
    """Return the stock configuration of the model that a remote output was made from.

    Its fields are read from the output's config.json.
    """
    from transformers import CONFIG_MAPPING

    config = read_config(directory)
    kind = config["kvfold"]["source_model_type"]
    return CONFIG_MAPPING[kind](vocab_size=config["vocab_size"])


def carries_own_code(directory: Path) -> bool:
    """Return whether the code files of a checkpoint are, byte for byte, those of this or an earlier kvfold.

    Then kvfold's own classes can stand for them, and no file of the checkpoint needs to run.
    """
    return is_remote(directory) and all(_is_own(directory, name) for name in FILES)


def missing_code(directory: Path) -> str:
    """Return the names of the code files that a remote output lacks; empty where it has all of them."""
    return ", ".join(name for name in FILES if not (directory / name).exists())


def code_refusal(directory: Path) -> str:
    """Return why a remote output that does not carry kvfold's own code is not loaded, and what to do."""
    missing = missing_code(directory)
    if missing:
        return (
            f"{directory} lacks files of its code ({missing}); copy them from where it came from, "
            "or convert the source again"
        )
    return (
        f"the code in {directory} (*_kvfold.py) is not that of this kvfold; read it, then allow it with "
        "--trust-remote-code, or convert the source again"
    )


def _is_own(directory: Path, name: str) -> bool:
    found = _digest(directory / name)
    return found == _digest(HERE / name) or found in EARLIER.get(name, ())


def _digest(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()
