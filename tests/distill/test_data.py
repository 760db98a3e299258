"""The order of data is a pure function of (seed, index)."""

import bz2
import gzip
import json
import lzma
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from kvfold.convert.errors import InvalidInput
from kvfold.distill.data import Windows, open_windows, write_tokens
from kvfold.distill.recipe import Data

STREAM = np.arange(101, dtype=np.int32)


def test_an_epoch_has_every_window_once_and_each_its_own_order() -> None:
    windows = Windows(STREAM, 10, seed=3)
    assert len(windows) == 10
    epochs = [windows.batch(range(first, first + 10)) for first in (0, 10)]
    for epoch in epochs:
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 100, 10))
        assert torch.equal(epoch, epoch[:, :1] + torch.arange(11))
    assert not torch.equal(*epochs)


def test_a_cursor_gives_the_same_windows_wherever_reading_starts() -> None:
    whole = Windows(STREAM, 10, seed=3).batch(range(25))
    late = Windows(STREAM, 10, seed=3)
    assert torch.equal(late.batch(range(17, 25)), whole[17:])
    dealt = [Windows(STREAM, 10, seed=3).batch(range(rank, 25, 2)) for rank in range(2)]
    assert torch.equal(dealt[0], whole[0::2])
    assert torch.equal(dealt[1], whole[1::2])
    assert not torch.equal(Windows(STREAM, 10, seed=4).batch(range(25)), whole)


def documents(tmp_path: Path, data: Data, student: Path, windows: int = 10**6) -> list[str]:
    """The documents in the token stream of a source."""
    tokenizer = AutoTokenizer.from_pretrained(student)
    file = tmp_path / "tokens.bin"
    file.unlink(missing_ok=True)
    write_tokens(file, data, tokenizer, windows)
    decoded: str = tokenizer.decode(np.fromfile(file, dtype=np.int32))
    assert decoded.startswith("<s>")
    return decoded.removeprefix("<s>").split("<s>")


def test_every_kind_of_file(tmp_path: Path, student: Path) -> None:
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in ("first", "second", ""))
    (tmp_path / "many").mkdir()
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "many" / "a.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.txt").write_text("first\n\nline\n")
    for source, expected in (
        ("a.jsonl", ["first", "second"]),
        ("many", ["first", "second"]),
        ("*/*.xz", ["first", "second"]),
        ("a.json.gz", ["first", "second"]),
        ("a.txt", ["first\n\nline\n"]),
    ):
        data = Data(source=str(tmp_path / source), seq_len=4)
        assert sorted(documents(tmp_path, data, student)) == expected


def test_the_standard_library_and_an_early_stop(tmp_path: Path, student: Path) -> None:
    data = Data(source="stdlib", seq_len=16, seed=5)
    some = documents(tmp_path, data, student, windows=300)
    assert len(open_windows(tmp_path / "tokens.bin", data)) == 300
    more = documents(tmp_path, data, student, windows=600)
    assert "".join(more).startswith("".join(some)[:4000])
    assert documents(tmp_path, data.model_copy(update={"seed": 6}), student, windows=300) != some


def test_mistakes_about_data_are_named(tmp_path: Path, student: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(student)
    (tmp_path / "a.jsonl").write_text('{"body": "text", "n": 3}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"\n{"text')
    (tmp_path / "a.pdf").write_text("x")
    noise = "".join(random.Random(0).choices("abcdefgh", k=4000))
    for name, compress in (("xz", lzma.compress), ("gz", gzip.compress), ("bz2", bz2.compress)):
        whole = compress(json.dumps({"text": noise}).encode())
        middle = len(whole) // 2
        (tmp_path / f"cut.jsonl.{name}").write_bytes(whole[:middle])
        (tmp_path / f"damaged.jsonl.{name}").write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    (tmp_path / "empty.jsonl").touch()
    for source, field, message in (
        ("a.jsonl", "text", "has no field 'text'; data.text_field can be body, n"),
        ("a.jsonl", "n", "holds no text"),
        ("a.jsonl", "body", "holds 5 tokens in 1 documents; one window of data.seq_len 16 takes 17"),
        ("bad.jsonl", "text", "cannot be read: JSON"),
        ("none.jsonl", "text", "names no .jsonl, .* file here and is no org/name on the Hub"),
        ("a.pdf", "text", "is of no known kind"),
        *((f"{kind}.jsonl.{name}", "text", "cannot be read: ") for kind in ("cut", "damaged") for name in ("xz", "gz", "bz2")),
        ("empty.jsonl", "text", "holds (no documents|0 tokens)"),
    ):
        data = Data(source=str(tmp_path / source), text_field=field, seq_len=16)
        with pytest.raises(InvalidInput, match=message):
            write_tokens(tmp_path / "tokens.bin", data, tokenizer, 10)
        assert not (tmp_path / "tokens.bin").exists()
