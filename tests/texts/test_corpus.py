"""Evaluation texts: plain files as they are, and files of rows by their documents."""

import gzip
import json
from pathlib import Path

import pytest
from datasets import Dataset

from kvfold.core.console import listening
from kvfold.core.errors import InvalidInput
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


def test_rows_without_a_text_are_left_out_and_counted(tmp_path: Path) -> None:
    full = [{"text": "abcdefgh" * count} for count in (1, 2, 3)]
    lines = [json.dumps(row) for row in full]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"other": 1}', "", '{"text": null}']) + "\n")
    (tmp_path / "a.json").write_text(json.dumps([*full, {"other": 1}]))
    Dataset.from_list([*full, {"text": None}]).to_parquet(tmp_path / "a.parquet")
    for name, absent in (("a.jsonl", 2), ("a.json", 1), ("a.parquet", 1)):
        with listening() as heard:
            assert len(read_text(str(tmp_path / name)).documents) == len(full)
        assert f"{absent} of {absent + len(full)} rows have no 'text' and were left out" in heard.notices[0]
        with listening() as heard:
            read_sequences(tmp_path / name, characters(), sequences=1, length=8, seed=0)
        assert f"{absent} of" in "".join(heard.notices)


def test_empty_rows_are_no_documents_of_a_calibration(tmp_path: Path) -> None:
    """Each was a BOS, so a file of empty rows gave windows of nothing else."""
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 100)
    with pytest.raises(InvalidInput, match="holds 0 tokens"):
        read_sequences(tmp_path / "a.jsonl", characters(), sequences=1, length=8, seed=0)
