"""JSON and YAML from files that kvfold did not write, with limits of size and depth.

A file of a checkpoint, a recipe or a text may be damaged or hostile. Every reader here raises `InvalidInput`
with one sentence that names the file, whatever the file holds.
"""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import InvalidInput

LIMIT_BYTES = 2**26
LINES_BYTES = 2**30
YAML_BYTES = 2**20  # a thousand times a recipe; it takes seconds to read
DEPTH = 64
CONTAINERS = 2**21  # of JSON, which take 20 times their bytes; the tokenizer.json of Gemma has 520,000
_YAML_NODES = 10**6  # with every alias written out
# A number of YAML, also one of base 60, whose digits take quadratic time.
_YAML_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxX_:.]*")
_MOST_DIGITS = 4300  # as of Python
_KINDS = {dict: "object", list: "list", str: "string", int: "number", float: "number", bool: "truth value"}


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
    path: Path,
    limit_bytes: int = LIMIT_BYTES,
    *,
    name: str | None = None,
    top: type | None = dict,
    containers: int = CONTAINERS,
) -> Any:
    """Read a JSON file that may be damaged or hostile.

    Args:
        path: a regular file, or a link to one.
        limit_bytes: the largest file that is read.
        name: the file's name in errors; by default its path.
        top: the type of the whole, `dict` or `list`; None for any.
        containers: the most lists and objects in it.

    Returns:
        The value.

    Raises:
        InvalidInput: the file cannot be read, exceeds a limit, is not JSON, or is of another type.
    """
    name = printable(path if name is None else name)
    content = _read_bytes(path, limit_bytes, name)
    if content.count(b"[") + content.count(b"{") > containers:  # those in texts count too
        raise InvalidInput(f"{name} holds more than {containers} lists and objects; shorten it")
    return parse_json(content, name, limit_bytes, top=top)


def parse_json(
    content: str | bytes,
    name: str,
    limit_bytes: int = LIMIT_BYTES,
    *,
    top: type | None = dict,
    unique_keys: bool = False,
    constants: bool = True,
) -> Any:
    """Parse JSON that may be damaged or hostile.

    Args:
        content: text, or bytes in UTF-8 with or without a byte order mark.
        name: the origin of the content, for errors.
        limit_bytes: the most characters or bytes of `content`.
        top: as in `read_json`.
        unique_keys: refuse an object that has a key twice; otherwise the last value counts.
        constants: accept NaN, Infinity and -Infinity, which Python writes and JSON does not have.

    Returns:
        The value.

    Raises:
        InvalidInput: as of `read_json`, or the options refuse the content.
    """
    text = _decode(content, limit_bytes, name)

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise InvalidInput(f"{name} has the key {printable(key)!r} twice in one object; keep one")
            found[key] = value
        return found

    def refuse_constant(constant: str) -> Any:
        raise InvalidInput(f"{name} holds {constant}, which is not a JSON number; give a finite number")

    try:
        value = json.loads(
            text,
            object_pairs_hook=read_object if unique_keys else None,
            parse_constant=None if constants else refuse_constant,
        )
    except InvalidInput:
        raise
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"{name} is not JSON ({error.msg}, line {error.lineno} column {error.colno}); give one JSON value"
        ) from None
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError:  # Python reads no integer of more than 4300 digits
        raise InvalidInput(f"{name} holds a number of too many digits; give a shorter one") from None
    if text.count("[") + text.count("{") > DEPTH and _is_too_deep(value):
        raise _too_deep(name)
    _check_top(value, top, name, "JSON")
    return value


def read_json_lines(path: Path, remedy: str) -> list[dict[str, Any]]:
    """Read a file of one JSON object per line that may be damaged or hostile.

    Args:
        path: a regular file, or a link to one.
        remedy: the advice in errors.

    Returns:
        The objects.

    Raises:
        InvalidInput: the file cannot be read or exceeds 1 GiB, or a line is not a JSON object.
    """
    name = printable(path)
    content = _decode(_read_bytes(path, LINES_BYTES, name), LINES_BYTES, name)
    try:
        return [parse_json(line, "a line") for line in content.split("\n") if line]
    except InvalidInput as mistake:
        reason = str(mistake).partition(";")[0]
        raise InvalidInput(f"{name} is damaged: {reason}; {remedy}") from None


def read_yaml(path: Path) -> dict[Any, Any]:
    """Read a YAML file of one mapping, written for kvfold, that may be damaged or hostile.

    Args:
        path: a regular file, or a link to one.

    Returns:
        The mapping, of YAML's plain types.

    Raises:
        InvalidInput: the file cannot be read, exceeds a limit, is not YAML, holds no mapping or one that has
            a key twice, or its aliases expand to more than a million values.
    """
    name = printable(path)
    mapping: dict[Any, Any] = parse_yaml(_read_bytes(path, YAML_BYTES, name), name, unique_keys=True)
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

    Args:
        content: text, or bytes in UTF-8.
        name: the origin of the content, for errors.
        limit_bytes: the most characters or bytes of `content`.
        top: the type of the whole, `dict` or `list`; None for any.
        unique_keys: refuse a mapping that has a key twice; otherwise the last value counts.

    Returns:
        The value, of YAML's plain types; None for no content if `top` is None.

    Raises:
        InvalidInput: the content exceeds a limit, is not YAML, is of another type, has a key twice where that
            is refused, or its aliases expand to more than a million values.
    """
    import yaml

    text = _decode(content, limit_bytes, name)
    try:
        _check_events(text, name)
        loader = _yaml_loader()(text)
        node = loader.get_single_node()
        if unique_keys:
            _check_keys(node, name)
        value = None if node is None else loader.construct_document(node)
    except InvalidInput:
        raise
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        # All but the first: dates, truth values and keys that PyYAML takes for what their tags say.
        reason = printable(" ".join(str(error).split()))
        raise InvalidInput(f"{name} is not YAML ({reason}); correct it") from None
    _check_top(value, top, name, "YAML")
    return value


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file of limited size.

    Args:
        path: the file, or a link to one.
        limit_bytes: the most bytes.

    Raises:
        InvalidInput: it cannot be read, is not a regular file, or is larger.
    """
    name = printable(path)
    content = _read_bytes(path, limit_bytes, name)
    if len(content) > limit_bytes:
        raise InvalidInput(f"{name} has more than {limit_bytes} bytes, the most that is read; shorten it")
    return content


def _read_bytes(path: Path, limit_bytes: int, name: str) -> bytes:
    """Return the content of a regular file; of a larger one than the limit only what shows that it is."""
    try:
        if path.exists() and not path.is_file():
            raise InvalidInput(f"{name} is not a regular file; name one")
        with path.open("rb") as stream:
            return stream.read(limit_bytes + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InvalidInput(f"{name} cannot be read: {reason}; name a file that can be read") from None
    except InvalidInput:
        raise
    except ValueError:  # a null character in the path
        raise InvalidInput(f"{name} cannot be read: no file has such a name") from None


def _decode(content: str | bytes, limit_bytes: int, name: str) -> str:
    if len(content) > limit_bytes:
        raise InvalidInput(f"{name} has more than {limit_bytes} bytes, the most that is read; shorten it")
    if isinstance(content, str):
        return content
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _is_too_deep(value: Any) -> bool:
    """Return whether lists and objects of JSON nest in more levels than `DEPTH`."""
    inside = [value]
    for _ in range(DEPTH + 1):
        containers = [each for each in inside if isinstance(each, dict | list)]
        inside = [one for each in containers for one in (each.values() if isinstance(each, dict) else each)]
        if not containers:
            return False
    return True


@functools.cache
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


def _check_events(text: str, name: str) -> None:
    """Refuse YAML that nests too deeply or whose aliases expand to too much, before any value is built."""
    import yaml

    anchored: dict[str, int] = {}  # values below each anchor, aliases written out
    opened: list[tuple[str | None, int]] = [(None, 0)]  # anchor, and values so far
    for event in yaml.parse(text, Loader=_yaml_loader()):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, 1))
            if len(opened) > DEPTH + 1:
                raise _too_deep(name)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = opened.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1
            if len(event.value) > _MOST_DIGITS and _YAML_NUMBER.fullmatch(event.value):
                raise InvalidInput(f"{name} holds a number of too many digits; give a shorter one")
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor is None or event.anchor not in anchored:
                raise InvalidInput(
                    f"{name} has the alias *{printable(str(event.anchor))} to nothing complete before "
                    "it; write it out"
                )
            anchor, size = None, anchored[event.anchor]
        else:
            continue
        if anchor is not None:
            anchored[anchor] = size
        above, count = opened.pop()
        opened.append((above, count + size))
        if count + size > _YAML_NODES:
            raise InvalidInput(
                f"{name} holds more than {_YAML_NODES} values, aliases written out; shorten it"
            )


def _check_keys(node: Any, name: str) -> None:
    """Refuse a YAML mapping with a key twice, in a tree of nodes of a depth that was checked.

    A key next to a merge (`<<`) that has it is no repetition, and neither are several merges.
    """
    import yaml

    waiting = [node]
    seen: set[int] = set()
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
            waiting += [key, value]
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if first := lines.get((key.tag, key.value)):
                where = f"line {line}" if first == line else f"lines {first} and {line}"
                raise InvalidInput(
                    f"{name} has the key {shorten(key.value)} twice in one mapping, on {where}; keep one"
                )
            lines[key.tag, key.value] = line


def _check_top(value: Any, top: type | None, name: str, language: str) -> None:
    if top is None or isinstance(value, top):
        return
    wanted: Mapping[type, str] = {**_KINDS, dict: "object" if language == "JSON" else "mapping"}
    found = "nothing" if value is None else f"a {wanted.get(type(value), type(value).__name__)}"
    found = found.replace("a object", "an object")
    expected = f"a {wanted[top]}".replace("a object", "an object")
    raise InvalidInput(f"{name} holds {found}; give {expected} of {language}")


def _too_deep(name: str) -> InvalidInput:
    return InvalidInput(f"{name} nests lists and objects more than {DEPTH} levels deep; flatten it")
