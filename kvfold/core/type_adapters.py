"""pydantic's checks of plain values against types, each made once."""

from functools import cache
from typing import Any


@cache
def type_adapter(kind: Any) -> Any:
    """Return the `pydantic.TypeAdapter` of a type; pydantic takes 3 ms to make one for a record's type.

    pydantic is imported when a check is first asked for.

    Example:
        >>> type_adapter(list[int]).validate_python(["1"])
        [1]
    """
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
