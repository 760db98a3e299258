"""The object of a config.json that says how layers rotate."""

from collections.abc import Mapping
from typing import Any


def stated_rope(config: Mapping[str, Any]) -> Any:
    """Return the object of a config.json, or of a complete one, that says how layers rotate.

    It is `rope_scaling` where there is one: transformers then passes over `rope_parameters`, be they stated
    or its class's own.
    """
    return config.get("rope_scaling") or config.get("rope_parameters") or {}
