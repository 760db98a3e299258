"""JSON and YAML that is damaged or hostile: one sentence each, and never a crash or a long wait."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvfold.core import untrusted
from kvfold.core.errors import InvalidInput
from kvfold.core.untrusted import parse_json, parse_yaml, printable, read_json, read_yaml

DEEP = 100_000
LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(("content", "options", "sentence"), [
    ("[" * DEEP, {"top": None}, "more than 64 levels"),
    ('{"a":' * DEEP, {}, "more than 64 levels"),
    ('{"a": ' + "[" * 64 + "]" * 64 + "}", {}, "more than 64 levels"),
    ('{"a": [[], ' * DEEP, {}, "more than 64 levels"),
    ("[[], " * 70 + "0" + "]" * 70, {"top": None}, "more than 64 levels"),
    ('"a", [' * DEEP, {}, "is not JSON"),
    ("]" * DEEP + "[" * 65, {}, "is not JSON"),
    ('"' + "\\" * DEEP, {}, "is not JSON"),
    ('[["' * 40 + '"' * DEEP, {}, "is not JSON"),
    ("", {}, r"is not JSON \(Expecting value, line 1 column 1\)"),
    ('{"a": 1', {}, "is not JSON"),
    (b"\xff{}", {}, r"is not UTF-8 text \(byte 0\)"),
    ("[1]", {}, "holds a list; give an object of JSON"),
    ("null", {}, "holds nothing; give an object of JSON"),
    ("{}", {"top": list}, "holds an object; give a list of JSON"),
    ('{"a": ' + "9" * 5000 + "}", {}, "is not JSON"),
    ('{"a": "' + "x" * 200 + '"}', {"limit_bytes": 100}, "more than 100 bytes"),
])  # fmt: skip
def test_json_that_is_refused(content: str | bytes, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=f"^here .*({sentence})") as refusal:
        parse_json(content, "here", **options)
    assert "\n" not in str(refusal.value)


def test_json_that_is_read() -> None:
    """Brackets in strings are no depth, and what is not asked for is not refused."""
    brackets = "[{" * DEEP + '\\"'
    assert parse_json(f'{{"a": "{brackets}", "b": [{{}}]}}', "here")["b"] == [{}]
    assert parse_json('{"a": 1, "a": 2}', "here") == {"a": 2}
    assert parse_json(b"\xef\xbb\xbf[NaN]", "here", top=None) != [0]
    assert parse_json("[" * 64 + "]" * 64, "here", top=list)
    assert parse_json("[[], " * 40 + "0" + "]" * 40, "here", top=list)


@pytest.fixture(params=["libyaml", "python"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read YAML with libyaml and without it."""
    if request.param == "python":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    untrusted._yaml_loader.cache_clear()
    yield
    untrusted._yaml_loader.cache_clear()


# Newer libyaml, as in wheels for Python 3.14, stops before kvfold does.
TOO_DEEP = "more than 64 levels|exceeded maximum nesting depth"


@pytest.mark.parametrize(("content", "options", "sentence"), [
    ("[" * DEEP, {"top": None}, TOO_DEEP),
    ("a: " + "{b: " * DEEP, {}, TOO_DEEP),
    ("- " * DEEP, {"top": None}, "more than 64 levels"),
    (LAUGHS, {}, "aliases written out"),
    ("a: *b", {}, "is not YAML"),
    ("a: &a [*a]", {}, "more than 64 levels"),
    ("a: [1", {}, "is not YAML"),
    ("a: !!python/object/apply:os.system [true]", {}, "is not YAML"),
    ("a: !!bool maybe", {}, "is not YAML"),
    ("a: !!timestamp q", {}, "is not YAML"),
    ("{[a]: 1}: 2", {}, "is not YAML"),
    ("a: \x00", {}, "is not YAML"),
    (b"\xff", {}, "is not UTF-8"),
    ("", {}, "holds nothing; give a mapping of YAML"),
    ("- 1", {}, "holds a list; give a mapping of YAML"),
    ("a: 1", {"limit_bytes": 3}, "more than 3 bytes"),
    ("a: 1\nb: 2\na: 3", {"unique_keys": True}, "has the key 'a' twice in one mapping, on lines 1 and 3"),
    ("- {b: 1, b: 1}", {"unique_keys": True, "top": None}, "the key 'b' twice in one mapping, on line 1;"),
    ("a: &x {b: 1}\nc: {<<: *x, d: 2, d: 3}", {"unique_keys": True}, "'d' twice .* on line 2;"),
    ("#" * (2**20 + 1), {}, "more than 1048576 bytes"),
])  # fmt: skip
@pytest.mark.usefixtures("loader")
def test_yaml_that_is_refused(content: str | bytes, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=f"^here .*({sentence})") as refusal:
        parse_yaml(content, "here", **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("loader")
def test_yaml_that_is_read() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x\nd: [*x, *x]", "here")["d"] == [{"b": 1}] * 2
    assert parse_yaml("", "here", top=None) is None
    assert parse_yaml("a: 2026-11-27\nb: 2026-99-99", "here") == {"a": "2026-11-27", "b": "2026-99-99"}
    assert parse_yaml("a: 1\na: 2", "here") == {"a": 2}
    merged = "a: &x {b: 1}\nc: &y {d: 1}\ne: {<<: *x, b: 2, <<: *y}\nf: *x\n1: 0\n'1': 0"
    assert parse_yaml(merged, "here", unique_keys=True)["e"] == {"b": 2, "d": 1}


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text('{"a": 1}')
    assert read_json(file) == read_yaml(file) == {"a": 1}
    (tmp_path / "twice").write_text("a: 1\na: 1")
    with pytest.raises(InvalidInput, match="twice has the key 'a' twice in one mapping, on lines 1 and 2"):
        read_yaml(tmp_path / "twice")
    (tmp_path / "link").symlink_to(file)
    assert read_json(tmp_path / "link") == {"a": 1}
    os.mkfifo(tmp_path / "fifo")
    refused: dict[Path, str] = {
        tmp_path: "is not a regular file", tmp_path / "fifo": "is not a regular file",
        Path("/dev/zero"): "is not a regular file", tmp_path / "none": "cannot be read: No such file",
        tmp_path / "null\0": "cannot be read", tmp_path / ("x" * 300): "cannot be read: File name too long",
    }  # fmt: skip
    for path, sentence in refused.items():
        for read in (read_json, read_yaml):
            with pytest.raises(InvalidInput, match=sentence):
                read(path)
    with pytest.raises(InvalidInput, match=r"^--rows a has more than 3 bytes"):
        read_json(file, 3, name="--rows a")
    assert printable("a\n\x1b[1m\udcff\u2028é\u202e") == r"a\n\x1b[1m\udcff\u2028é\u202e"
