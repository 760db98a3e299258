"""JSON and YAML from files that kvfold did not write, with limits of size and depth.

A file of a checkpoint, a recipe or a text may be damaged or hostile. Every reader here raises `InvalidInput`
with one sentence that names the file, whatever the file holds.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from .errors import InvalidInput

LIMIT_BYTES = 2**26
LINES_BYTES = 2**30
YAML_BYTES = 2**20  # a thousand times a recipe; it takes seconds to read
DEPTH = 64
_VALUES = 10**6  # of YAML, with every alias written out


def printable(name: str | Path) -> str:
    """Return a name of a file on one line, in which escapes stand for what does not print.

    That is control characters, lone surrogates, and characters that turn the direction of writing.
    """
    text = str(name)
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def shorten(value: Any, width: int = 80) -> str:
    """Return a value of a file as Python writes it, on one line and of at most `width` characters."""
    try:
        text = printable(repr(value))
    except ValueError:  # Python writes no number of more than 4,300 digits
        text = "a number of more digits than Python writes"
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def is_text(value: Any) -> bool:
    """Return whether a value is a text that UTF-8 can hold: JSON also writes halves of characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def read_json(
    path: Path, limit_bytes: int = LIMIT_BYTES, *, name: str | None = None, top: type | None = dict
) -> Any:
    """Read a JSON file that may be damaged or hostile.

    `path` is a regular file or a link to one, `name` stands for it in errors, and `top` is the type of the
    whole; None: any.

    Raises:
        InvalidInput: the file cannot be read, exceeds a limit, is not JSON, or is of another type.
    """
    name = printable(path if name is None else name)
    return parse_json(read_bytes(path, limit_bytes, name), name, limit_bytes, top=top)


def parse_json(
    content: str | bytes, name: str, limit_bytes: int = LIMIT_BYTES, *, top: type | None = dict
) -> Any:
    """Parse JSON that may be damaged or hostile.

    `name` says in errors what it is; the other arguments are those of `read_json`.

    Raises:
        InvalidInput: as of `read_json`.
    """
    text = _decode(content, limit_bytes, name)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"{name} is not JSON ({error.msg}, line {error.lineno} column {error.colno}); give one JSON value"
        ) from None
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:  # Python reads no integer of more than 4,300 digits
        raise InvalidInput(f"{name} is not JSON ({error}); correct it") from None
    if text.count("[") + text.count("{") > DEPTH:  # those in texts count too
        _check_extent(value, name, None)
    _check_top(value, top, name, {dict: "an object of JSON", list: "a list of JSON"})
    return value


def read_json_lines(path: Path, remedy: str) -> list[dict[str, Any]]:
    """Read a file of one JSON object per line that may be damaged or hostile.

    `remedy` is the advice in errors.

    Raises:
        InvalidInput: the file cannot be read or exceeds 1 GiB, or a line is not a JSON object.
    """
    name = printable(path)
    content = _decode(read_bytes(path, LINES_BYTES), LINES_BYTES, name)
    try:
        return [parse_json(line, "a line") for line in content.split("\n") if line]
    except InvalidInput as mistake:
        reason = str(mistake).partition(";")[0]
        raise InvalidInput(f"{name} is damaged: {reason}; {remedy}") from None


def read_yaml(path: Path) -> dict[Any, Any]:
    """Read a YAML file of one mapping, written for kvfold.

    Returns:
        The mapping, of YAML's plain types.

    Raises:
        InvalidInput: as of `parse_yaml` with unique keys, or the file cannot be read.
    """
    mapping: dict[Any, Any] = parse_yaml(read_bytes(path, YAML_BYTES), printable(path), unique_keys=True)
    return mapping


def parse_yaml(
    content: str | bytes,
    name: str,
    limit_bytes: int = YAML_BYTES,
    *,
    top: type | None = dict,
    unique_keys: bool = False,
) -> Any:
    """Parse YAML that may be damaged or hostile.

    `name`, `limit_bytes` and `top` are as in `read_json`. With `unique_keys` no mapping may have a key twice;
    otherwise the last value counts.

    Returns:
        The value, of YAML's plain types; None for no content if `top` is None.

    Raises:
        InvalidInput: the content exceeds a limit, is not YAML, is of another type, has a key twice where that
            is refused, or its aliases expand to more than a million values.
    """
    import yaml

    text = _decode(content, limit_bytes, name)
    try:
        _check_depth(text, name)  # libyaml would overflow the stack
        loader = _yaml_loader()(text)
        node = loader.get_single_node()
        if unique_keys:
            _check_keys(node, name)
        value = None if node is None else loader.construct_document(node)
    except InvalidInput:
        raise
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        # All but the first: values that PyYAML takes for what their tags say.
        reason = printable(" ".join(str(error).split()))
        raise InvalidInput(f"{name} is not YAML ({reason}); correct it") from None
    _check_extent(value, name)
    _check_top(value, top, name, {dict: "a mapping of YAML", list: "a list of YAML"})
    return value


def read_bytes(path: Path, limit_bytes: int, name: str | None = None) -> bytes:
    """Return the content of a regular file of limited size.

    `name` stands for it in errors.

    Raises:
        InvalidInput: it cannot be read, is not a regular file, or is larger.
    """
    name = printable(path) if name is None else name
    try:
        if path.exists() and not path.is_file():
            raise InvalidInput(f"{name} is not a regular file; name one")
        with path.open("rb") as stream:
            content = stream.read(limit_bytes + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InvalidInput(f"{name} cannot be read: {reason}; name a file that can be read") from None
    except InvalidInput:
        raise
    except ValueError:  # a null character in the path
        raise InvalidInput(f"{name} cannot be read: no file has such a name") from None
    if len(content) > limit_bytes:
        raise _too_large(name, limit_bytes)
    return content


def _decode(content: str | bytes, limit_bytes: int, name: str) -> str:
    if len(content) > limit_bytes:
        raise _too_large(name, limit_bytes)
    if isinstance(content, str):
        return content
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


@cache
def _yaml_loader() -> Any:
    """Return the class that reads YAML's plain types: libyaml's, else Python's, which is far slower.

    A date is read as its text: a recipe has no dates, and a directory may be called 2026-11-27.
    """
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader


def _check_depth(text: str, name: str) -> None:
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=_yaml_loader()):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH:
            raise _too_deep(name)


def _check_extent(value: Any, name: str, most: int | None = _VALUES) -> None:
    """Refuse a value that nests too deeply, or whose aliases expand to too many values."""
    level, count = [value], 0
    for _ in range(DEPTH + 1):
        containers = [each for each in level if isinstance(each, dict | list)]
        if not containers:
            return
        count += sum(map(len, containers))
        if most is not None and count > most:
            raise InvalidInput(f"{name} holds more than {most:,} values, aliases written out; shorten it")
        level = [one for each in containers for one in (each.values() if isinstance(each, dict) else each)]
    raise _too_deep(name)


def _check_keys(root: Any, name: str) -> None:
    """Refuse a YAML mapping with a key twice, in a tree of nodes of a depth that was checked.

    A key next to a merge (`<<`) that has it is no repetition, and neither are several merges.
    """
    import yaml

    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if not isinstance(node, yaml.MappingNode):
            waiting += node.value
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            waiting.append(value)
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                where = f"line {line}" if first == line else f"lines {first} and {line}"
                raise InvalidInput(
                    f"{name} has the key {shorten(key.value)} twice in one mapping, on {where}; keep one"
                )
            lines[key.tag, key.value] = line


def _check_top(value: Any, top: type | None, name: str, wanted: dict[type, str]) -> None:
    if top is None or isinstance(value, top):
        return
    kinds = {type(None): "nothing", dict: "an object", list: "a list", str: "a text"}
    found = kinds.get(type(value), "a single value")
    raise InvalidInput(f"{name} holds {found}; give {wanted[top]}")


def _too_large(name: str, limit_bytes: int) -> InvalidInput:
    return InvalidInput(f"{name} has more than {limit_bytes} bytes, the most that is read; shorten it")


def _too_deep(name: str) -> InvalidInput:
    return InvalidInput(f"{name} nests lists and objects more than {DEPTH} levels deep; flatten it")


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
