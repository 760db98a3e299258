"""A text that cannot be read is named with the line that is to be corrected."""

from pathlib import Path

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.texts.sources import DocumentSource, read_texts

GOOD = b'{"text": "a"}\n'


def refusal(place: Path) -> str:
    with pytest.raises(InvalidInput) as caught:
        list(read_texts(DocumentSource(str(place)), seed=0))
    return str(caught.value)


@pytest.mark.parametrize(("name", "content", "sentence"), [
    ("a.jsonl", GOOD + b'\n{"text": \n' + GOOD,
     "line 3 is not JSON (Expecting value, column 9); write one JSON object per line"),
    ("a.json", b'[\n{"text": "a"},',
     "line 2 is not JSON (Expecting value, column 15); write a list of objects, or one JSON object per line"),
    ("a.jsonl", GOOD + b'{"text": "caf\xe9"}\n', "line 2 is not UTF-8 text (byte 13); save it as UTF-8"),
    ("a.json", b'[{"text": "caf\xe9"}]\n', "it is not UTF-8 text (byte 14); save it as UTF-8"),
    ("a.txt", b"caf\xe9", "it is not UTF-8 text (byte 3); save it as UTF-8"),
])  # fmt: skip
def test_the_place_of_a_mistake_is_named(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert refusal(file) == f"data.source {file} cannot be read: {sentence}"
    (tmp_path / f"0-good{file.suffix}").write_bytes(GOOD)
    called = sentence.replace("it is", "is") if sentence.startswith("it") else sentence
    assert refusal(tmp_path) == f"data.source {tmp_path} cannot be read: {file} {called}"


def test_other_mistakes_keep_their_readers_words(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1")
    assert f"data.source {file} cannot be read: " in refusal(file)
