"""pydantic's checks of plain values against types, each made once."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


def type_adapter(kind: type[T]) -> "TypeAdapter[T]":
    """Return what checks values against a type; pydantic takes 3 ms to make one for a record's type.

    pydantic is imported when a check is first asked for.

    Example:
        >>> type_adapter(list[int]).validate_python(["1"])
        [1]
    """
    made: Callable[[Any], TypeAdapter[T]] = _made  # a cached function takes no type variable
    return made(kind)


@cache
def _made(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
