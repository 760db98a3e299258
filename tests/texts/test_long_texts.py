"""Plain texts are read in parts, and are the same documents as when they are read at once."""

import gzip
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kvfold.core.errors import InvalidInput
from kvfold.distill.data.token_documents import text_pieces
from kvfold.texts import document_rows, documents, token_parts
from kvfold.texts.document_rows import DocumentSource, LongText
from kvfold.texts.documents import read_sequences
from kvfold.texts.sources import read_long_texts, read_texts

TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "recipes" / "demo")
PART = 50
# Line ends of every kind, a mark of byte order, and characters of up to four bytes, at all places of a part.
ODD = "\ufeff" + "".join(f"a{'b' * (n % 7)}\r\n\r\u00e4\n\u4e2d\U0001f600\u2028" for n in range(60)) + "\r"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (document_rows, token_parts):
        monkeypatch.setattr(module, "PART", PART)
    monkeypatch.setattr(token_parts, "_OVERLAP", 30)


def pieces(place: Path) -> Any:
    source = SimpleNamespace(documents=DocumentSource(str(place)))
    return text_pieces(source, SimpleNamespace(packing="documents", seed=0), TOKENIZER)  # type: ignore[arg-type]


def test_parts_are_the_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(ODD.encode())
    (text,) = next(read_long_texts(DocumentSource(str(file)), seed=0))
    assert isinstance(text, LongText)
    assert max(map(len, text)) == PART
    assert "".join(text) == file.read_text(encoding="utf-8")
    assert list(read_texts(DocumentSource(str(file)), seed=0)) == [["".join(text)]]
    ids = [token for piece in pieces(file) for token in piece.ids.tolist()]
    whole = TOKENIZER(file.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    assert ids[1:-1] == whole


def test_files_keep_the_order_of_datasets(tmp_path: Path) -> None:
    """Long and short ones, as the readers of `datasets` give whole files in an order of a seed."""
    from datasets import load_dataset

    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_text(chr(97 + number) * (number * 20 + 1))
    (tmp_path / "empty.txt").touch()
    for seed in (0, 3):
        rows = load_dataset(
            "text", data_dir=str(tmp_path), split="train", streaming=True, sample_by="document"
        )
        wanted = [row["text"] for row in rows.shuffle(seed, buffer_size=document_rows.SHUFFLE_BUFFER)]
        found = [text for texts in read_texts(DocumentSource(str(tmp_path)), seed) for text in texts]
        assert found == [text for text in wanted if text]
        assert len(found) == 12


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    """A byte far behind the tokens of a run is not seen; one that is read is named by its place."""
    file = tmp_path / "a.txt"
    file.write_bytes(b"abc" * 10_000 + b"\xe4\xb8\xff")
    found = pieces(file)
    assert next(found).ids.size > 2
    with pytest.raises(InvalidInput, match=r"a\.txt cannot be read: it is not UTF-8 .* \(byte 30000\); save"):
        list(found)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_calibration_holds_blocks(compress: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ("a.txt" if compress is bytes else "a.txt.gz")
    content = "".join("abcdefgh"[n * n % 8] + "\r\n" * (n % 5 == 0) for n in range(3_000))
    file.write_bytes(compress(content.encode()))
    found = []
    for held in (2**25, 400, 1):
        monkeypatch.setattr(documents, "_HELD", held)
        found.append(read_sequences(file, TOKENIZER, sequences=30, length=9, seed=2))
    assert all(torch.equal(windows, found[0]) for windows in found)
    flawed = content.encode() + "\u4e2d".encode()[:2]
    file.write_bytes(compress(flawed))
    with pytest.raises(InvalidInput, match=rf"is not UTF-8 .* \(byte {len(flawed) - 2}\); save it as UTF-8"):
        read_sequences(file, TOKENIZER, sequences=1, length=9, seed=0)


class _SlowTokenizer:
    """A tokenizer that does not tell where its tokens are, as the slow ones of transformers."""

    is_fast = False

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(text)]}


def test_a_text_that_is_whole_is_not_joined_anew(tmp_path: Path) -> None:
    """Joining a string takes eight bytes and more for each of its characters."""
    short, long = "ab" * (PART // 2), "ab" * 500_000
    (tmp_path / "a.txt").write_text(short)
    (tmp_path / "b.txt").write_text("a" * 2 * PART)
    read = read_texts(DocumentSource(str(tmp_path)), seed=0)
    assert sorted(len(text) for texts in read for text in texts) == [PART, 2 * PART]
    tracemalloc.start()
    try:
        assert next(token_parts.token_parts(_SlowTokenizer(), long)).ids == [len(long)]
        assert tracemalloc.get_traced_memory()[1] < len(long)
    finally:
        tracemalloc.stop()
