"""Evaluation texts: plain files as they are, and files of rows by their documents."""

import gzip
import json
from pathlib import Path

import pytest
from datasets import Dataset

from kvfold.core.errors import InvalidInput
from kvfold.texts import sources
from kvfold.texts.corpus import read_text
from kvfold.texts.documents import read_sequences

from ..support.tokenizers import characters

DOCUMENTS = ["One sentence.", "Another one,\nof two lines.", "A third."]


def rows(key: str = "text") -> list[dict[str, str]]:
    return [{key: document} for document in DOCUMENTS]


def test_rows_are_read_by_their_documents(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows())
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps(rows()))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    Dataset.from_list(rows()).to_parquet(tmp_path / "a.parquet")
    texts = {file.name: read_text(str(file)) for file in sorted(tmp_path.iterdir())}
    assert {name: text.name for name, text in texts.items()} == {name: f"text:{name}" for name in texts}
    assert len({text.sha256 for text in texts.values()}) == 1
    found = read_text(f"text:{tmp_path / 'a.jsonl'}")
    assert sorted(found.documents) == sorted(DOCUMENTS)
    assert found.joined == "\n\n".join(found.documents)


def test_a_plain_text_of_any_suffix_is_read_as_it_is(tmp_path: Path) -> None:
    content = "a,b\r\n1,2\r\n"
    for name in ("a.txt", "a.csv", "a.md", "a"):
        (tmp_path / name).write_bytes(content.encode())
        assert read_text(str(tmp_path / name)).documents == (content,)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"compressed prose"))
    assert read_text(str(tmp_path / "b.txt.gz")).documents == ("compressed prose",)


def test_rows_without_text_are_refused(tmp_path: Path) -> None:
    for name, content, sentence in (
        ("other.jsonl", json.dumps({"prompt": "a", "answer": "b"}), "it has prompt, answer; rename the"),
        ("number.jsonl", json.dumps({"text": 1}), "the field 'text' holds no text"),
        ("empty.jsonl", "", "holds no documents"),
        ("blank.jsonl", json.dumps({"text": " "}), "holds no text"),
        ("broken.parquet", "PAR1", "--text .*broken.parquet cannot be read"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(InvalidInput, match=sentence) as caught:
            read_text(str(tmp_path / name))
        assert "iconv" not in str(caught.value)


def test_a_row_that_lacks_its_text_is_named(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in rows()]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"other": 1}', "", '{"text": null}']) + "\n")
    (tmp_path / "a.json").write_text(json.dumps([*rows(), {"other": 1}]))
    Dataset.from_list([*rows(), {"text": None}]).to_parquet(tmp_path / "a.parquet")
    for name, row in (("a.jsonl", "line 4"), ("a.json", "a row"), ("a.parquet", "a row")):
        with pytest.raises(InvalidInput, match=f"--text .*{name}: {row} has no 'text'; give every row one"):
            read_text(str(tmp_path / name))
        with pytest.raises(InvalidInput, match=f"{name}.* has no (field \"text\"|'text'); give"):
            read_sequences(tmp_path / name, characters(), sequences=1, length=8, seed=0)


@pytest.mark.parametrize(
    "content",
    ['{\n"text": "a"\n}\n{\n"other": 1\n}\n', '{"text": "a"} {"text": null}\n'],
    ids=["several lines", "one line"],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_objects_that_are_not_one_of_each_line(content: str, name: str, tmp_path: Path) -> None:
    """Arrow reads them, so the row that lacks its text has no line of its own."""
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInput, match=f"--text .*{name}: a row has no 'text'; give every row one"):
        read_text(str(tmp_path / name))


def test_many_empty_rows_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_EMPTY", 500)
    monkeypatch.setattr(sources, "read_batches", lambda *_: iter([{"text": [""] * 501}]))
    with pytest.raises(InvalidInput, match=r"org/name has more than 500 .*; name another source$"):
        list(sources.read_texts(sources.DocumentSource("org/name"), seed=0))


def test_many_empty_rows_in_a_row_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few kilobytes holds so many that they are read for minutes; here fewer are refused."""
    monkeypatch.setattr(sources, "MOST_EMPTY", 500)
    full = json.dumps({"text": "a" * 64}) + "\n"
    for name, empty in (("a.jsonl.gz", '{"text": ""}\n'), ("b.jsonl.gz", '{"text": ""}\n\n')):
        content = full + empty * 6000 + full
        (tmp_path / name).write_bytes(gzip.compress(content.encode()))
        for read in (
            lambda file: read_text(str(file)),
            lambda file: read_sequences(file, characters(), sequences=1, length=8, seed=0),
        ):
            with pytest.raises(
                InvalidInput, match=f"{name} has more than 500 empty rows one after the other; remove them"
            ):
                read(tmp_path / name)


def test_empty_rows_are_no_documents_of_a_calibration(tmp_path: Path) -> None:
    """Each was a BOS, so a file of empty rows gave windows of nothing else."""
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 100)
    with pytest.raises(InvalidInput, match="holds 0 tokens"):
        read_sequences(tmp_path / "a.jsonl", characters(), sequences=1, length=8, seed=0)
