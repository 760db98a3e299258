"""A config.json as transformers' configuration class loads it: its defaults, its names, its corrections.

Only the module of that class is imported, and not before it is asked for.
"""

import json
from collections.abc import Mapping
from typing import Any

from ...core.errors import InvalidInput
from ...core.untrusted import printable
from .family import Family

# Fields that the class moves into rope_parameters, or does not read.
_MOVED = ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
_FORMER = {"attention": "full_attention", "mamba": "linear_attention"}  # kinds of layers by transformers 4


def _class_of(family: Family) -> Any:
    import transformers

    if family.kind not in transformers.CONFIG_MAPPING:
        raise InvalidInput(
            f"transformers {transformers.__version__} has no class of {family.label} (model_type "
            f"{family.kind}); install a newer one"
        )
    return transformers.CONFIG_MAPPING[family.kind]


def default_of(family: Family, field: str) -> Any:
    """Return the value of a field that config.json leaves out; None for one that the class does not have."""
    return getattr(_class_of(family), field, None)


def _with_infinities(found: dict[str, Any]) -> Any:
    """Return an object of config.json, or the number without digits that transformers writes as one."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def loaded_config(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the configuration that the class makes of a config.json, next to its others."""
    from huggingface_hub.errors import StrictDataclassError

    from ...models.load_failures import no_warnings

    refusals = (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
    kind = _class_of(family)
    stated = {field: value for field, value in config.items() if field != "model_type"}
    try:
        with no_warnings():
            # A copy, because the class changes objects in it.
            made = kind.from_dict(json.loads(json.dumps(stated), object_hook=_with_infinities))
    except refusals as error:
        reason = printable(" ".join(str(error).rpartition("Error: ")[2].split()))
        raise InvalidInput(f"{kind.__name__} of transformers cannot read config.json: {reason}") from error
    fields = {field: value for field, value in vars(made).items() if field[0] != "_" and field != "dtype"}
    whole = {field: value for field, value in config.items() if field not in _MOVED} | fields
    names = {**kind.attribute_map, **family.names}
    whole |= {ours: getattr(made, theirs) for ours, theirs in names.items() if hasattr(made, theirs)}
    kinds = getattr(made, "layer_types", None) or getattr(made, "layers_block_type", None)
    return whole | ({} if kinds is None else {"layer_types": [_FORMER.get(each, each) for each in kinds]})
