"""Remote outputs loaded by transformers' Auto classes with the installed kvfold's code."""

import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import cached_file

from ..checkpoints.record import FILE
from ..core.errors import InvalidInput
from ..core.untrusted import read_json
from ..core.version import __version__
from .remote_code import MODEL_TYPE
from .shipped.configuration_kvfold import KvfoldConfig
from .shipped.modeling_kvfold import KvfoldForCausalLM, KvfoldModel


def register_auto_classes() -> None:
    """Let the Auto classes of transformers load remote outputs without `trust_remote_code`.

    The code next to the weights does not run then, whatever `trust_remote_code` says: the same files of the
    installed kvfold do. An output of a newer kvfold is refused with `InvalidInput`.
    """
    AutoConfig.register(MODEL_TYPE, InstalledConfig, exist_ok=True)
    # So that `save_pretrained` of a loaded model writes the code next to the weights.
    KvfoldConfig.register_for_auto_class("AutoConfig")
    KvfoldModel.register_for_auto_class("AutoModel")
    KvfoldForCausalLM.register_for_auto_class("AutoModelForCausalLM")


def register_models(config_class: Any) -> None:
    """Register the model classes for the configuration class of folds of one stock model type."""
    AutoModel.register(config_class, KvfoldModel, exist_ok=True)
    AutoModelForCausalLM.register(config_class, KvfoldForCausalLM, exist_ok=True)


class InstalledConfig(KvfoldConfig):
    """The configuration class that AutoConfig finds by the model type of remote outputs."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration from the content of config.json; `kwargs` as in transformers.

        Raises:
            InvalidInput: a newer kvfold wrote the output.
        """
        place = kwargs.get("name_or_path")
        if place is not None:
            check_version(str(place), config_dict.get("_commit_hash"))
        made = super().from_dict(config_dict, **kwargs)
        register_models(type(made[0] if isinstance(made, tuple) else made))
        return made


def check_version(place: str, revision: str | None = None) -> None:
    """Refuse an output that a newer kvfold wrote; one without a record passes.

    Args:
        place: a directory, or a name on the Hub.
        revision: the commit there.

    Raises:
        InvalidInput: its kvfold.json names a newer kvfold than the installed one.
    """
    lenient = {
        f"_raise_exceptions_for_{what}": False
        for what in ("missing_entries", "gated_repo", "connection_errors")
    }
    record = cached_file(place, FILE, revision=revision, **lenient)
    written = "" if record is None else str(read_json(Path(record)).get("kvfold", ""))
    if _numbers(written) > _numbers(__version__):
        raise InvalidInput(
            f"kvfold {written} wrote {place}, and the installed kvfold {__version__} is older; run "
            "pip install --upgrade kvfold"
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
