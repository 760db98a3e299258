"""Calibration text from every kind of file, and a sentence for what is none."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.core.errors import InvalidInput
from kvfold.models.causal_lm import load_model, load_tokenizer
from kvfold.texts import document_rows
from kvfold.texts.document_rows import DocumentSource
from kvfold.texts.documents import check_calibration, read_sequences
from kvfold.texts.sources import read_texts

from ..support.tiny import make
from ..support.tokenizers import characters

TAKEN: dict[str, Any] = {"sequences": 4, "length": 10, "seed": 0}


def test_read_sequences(tmp_path: Path) -> None:
    tokenizer = characters()
    (tmp_path / "a.txt").write_text("".join(random.Random(0).choices("abcdefgh", k=800)))
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": letter * 9}) + "\n" for letter in "abcdefgh")
    )
    for name in ("a.txt", "a.jsonl"):
        windows = read_sequences(tmp_path / name, tokenizer, sequences=4, length=10, seed=0)
        assert windows.shape == (4, 10)
        assert (windows[:, 0] == 0).all()
        assert torch.equal(
            windows, read_sequences(tmp_path / name, tokenizer, sequences=4, length=10, seed=0)
        )
        assert not torch.equal(
            windows, read_sequences(tmp_path / name, tokenizer, sequences=4, length=10, seed=1)
        )
    assert (windows[:, 1:] == windows[:, 1:2]).all(), "a document fills each window here"
    for length, advice in ((10, "read at most 8 sequences from it"), (81, "take a shorter length")):
        with pytest.raises(InvalidInput, match=f"holds 80 tokens, .* or {advice}"):
            read_sequences(tmp_path / "a.jsonl", tokenizer, sequences=9, length=length, seed=0)
    (tmp_path / "b.jsonl").write_text('{"content": "no text"}\n')
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    for name, reason in {
        "b.jsonl": 'has no text in a field "text"; give objects',
        "c.txt": "UTF-8",
        "d.txt": "is not none, self, stdlib, a file",
        "e.csv": "is not none, self, stdlib, a file",
    }.items():
        with pytest.raises(InvalidInput, match=reason):
            read_sequences(tmp_path / name, tokenizer, sequences=1, length=2, seed=0)


def test_the_standard_library_without_its_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word comes before a file of that name, as in `eval --text`."""
    parts = {True: ("h" * 99,), False: ("abc" * 33, "def" * 33)}
    monkeypatch.setattr(document_rows, "stdlib_documents", lambda held_out: parts[held_out])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib").write_text("h" * 99)
    check_calibration("stdlib")
    tokenizer = characters()
    found = read_sequences("stdlib", tokenizer, **TAKEN)
    assert tokenizer.convert_tokens_to_ids("h") not in found
    assert torch.equal(found, read_sequences("stdlib", tokenizer, **TAKEN))


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    for path in make(tmp_path / "model").glob("tokenizer*"):
        path.unlink()
    with pytest.raises(InvalidInput, match=r"model has no tokenizer; copy tokenizer\.json and"):
        load_tokenizer(tmp_path / "model")


def test_a_plain_text_may_have_any_suffix(tmp_path: Path) -> None:
    """As for `eval --text`, it is read like a .txt file, for calibration and for training."""
    content = "".join(letter * 9 for letter in "abcdefgh")
    found = []
    for name in ("a.txt", "README.md", "NOTICE"):
        (tmp_path / name).write_text(content, encoding="utf-8")
        check_calibration(str(tmp_path / name))
        found.append(read_sequences(tmp_path / name, characters(), **TAKEN))
        assert list(read_texts(DocumentSource(str(tmp_path / name)), 0)) == [[content]]
    assert all(torch.equal(windows, found[0]) for windows in found)
    (tmp_path / "long.md").write_text("\N{SNOWMAN}" * 2**15, encoding="utf-8")
    check_calibration(str(tmp_path / "long.md"))


def test_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("a")
    (tmp_path / "mixed" / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "page.pdf").write_bytes(b"%PDF-1.7\n\xe2\xe3")
    (tmp_path / "weights.md").write_bytes(b"text\0")
    (tmp_path / "late.md").write_bytes(b"text" * 2**15 + b"\xff")
    (tmp_path / "number.jsonl").write_text('{"text": 1}\n')
    (tmp_path / "other.json").write_text('{"content": "a"}\n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    for name, reason in {
        "empty": "holds no file of a known kind",
        "mixed": "holds files of several kinds",
        "page.pdf": "is of no known kind and no UTF-8 text; name a UTF-8 text file, or one of",
        "weights.md": "is of no known kind and no UTF-8 text",
        "absent.txt": "is not none, self, stdlib, a file",
        "a/b/c": "is not none, self, stdlib, a file",
    }.items():
        with pytest.raises(InvalidInput, match=reason):
            check_calibration(str(tmp_path / name))
    for name, reason in {
        "number.jsonl": 'has no text in a field "text"; give objects',
        "other.json": "has no field 'text'; it has content; rename the field with the documents to 'text'",
        "broken.parquet": "cannot be read",
        "late.md": "is not UTF-8 text",
        "empty": "holds no file of a known kind",
    }.items():
        with pytest.raises(InvalidInput, match=reason):
            read_sequences(tmp_path / name, characters(), **TAKEN)
    for name in ("org/name", "org/name:config", "org/name:config:train", "org/name::train:content"):
        check_calibration(name)
        check_calibration(f"self+{name}")


def test_a_directory_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not stop root, so the system's answer is imitated."""
    closed = tmp_path / "texts" / "closed"
    closed.mkdir(parents=True)
    scandir = os.scandir

    def refuse(place: Any) -> Any:
        if Path(place) == closed:
            raise PermissionError(13, "Permission denied", str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InvalidInput, match="texts cannot be read: Permission denied"):
        check_calibration(str(tmp_path / "texts"))


def test_data_set_is_asked_for_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        return datasets.Dataset.from_dict({"content": ["ab" * 50]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(document_rows, "_read_apart", lambda request, _: document_rows.open_rows(request))
    assert read_sequences("org/name:small:test:content", characters(), **TAKEN).shape == (4, 10)
    with pytest.raises(InvalidInput, match="field 'text'; FIELD of org/name::train:FIELD can be content"):
        read_sequences("org/name", characters(), **TAKEN)
    assert asked == [("org/name", "small", "test", True), ("org/name", None, "train", True)]


def test_load_model_and_tokenizer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Float32 and eager from any dtype, without a sound; a sentence for what is no checkpoint."""
    directory = make(tmp_path / "tiny", dtype=torch.bfloat16)
    (directory / "tokenizer.json").unlink()
    characters().save_pretrained(directory)
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    assert capfd.readouterr().err == ""
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.bos_token_id == 0
    with pytest.raises(InvalidInput, match=r"has no config\.json"):
        load_model(tmp_path / "absent")
