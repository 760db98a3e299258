"""Texts that are damaged or hostile: one sentence each, and the process that reads them lives on."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.texts.document_rows import read_downloaded
from kvfold.texts.documents import check_calibration, read_sequences
from kvfold.texts.sources import DocumentSource, check_source, first_rows, local_files, read_texts

from ..support.tokenizers import characters

GOOD = '{"text": "' + "abcdefgh" * 20 + '"}\n'
DEEP = b"[" * 100_000


def calibrate(place: Path) -> list[str]:
    windows = read_sequences(place, characters(), sequences=2, length=16, seed=0)
    return ["".join(map(str, row)) for row in windows.tolist()]


def train(place: Path) -> list[str]:
    return [text for texts in read_texts(DocumentSource(str(place)), seed=0) for text in texts]


READERS: list[Callable[[Path], list[str]]] = [calibrate, train]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("name", "content", "sentence"), [
    ("n.json", b"null", "its reader crashed on it"),
    ("n.json", b"null\n" + GOOD.encode(), "its reader crashed on it"),
    ("n.json", b'{"text": ' + DEEP + b"]" * 100_000 + b"}", "its reader crashed on it"),
    ("n.json", DEEP, "cannot be read: "),
    ("n.json", b"1", "cannot be read: "),
    ("n.json", b"", "holds no documents"),
    ("n.json", b'{"text": "\xff"}', "cannot be read: "),
    ("n.json", b"[[1]]", "holds no text|has no text"),
    ("n.jsonl", b"null", "holds nothing; give an object|its reader crashed on it"),
    ("n.jsonl", DEEP, "line 1 nests lists and objects more than 64|cannot be read: "),
    ("n.jsonl", b'{"text": "\xff"}', "is not UTF-8|cannot be read: "),
    ("n.txt", b"\xff", "is not UTF-8|cannot be read: "),
    ("n.parquet", b"PAR1" + bytes(99) + b"PAR1", "cannot be read: "),
    ("n.jsonl.gz", b"no gzip", "cannot be read: "),
    ("n.jsonl.zst", b"no zstd", "cannot be read: "),
])  # fmt: skip
def test_content(
    read: Callable[[Path], list[str]], tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match=sentence) as refusal:
        read(file)
    assert "\n" not in str(refusal.value)
    assert name in str(refusal.value)
    assert "Traceback" not in str(refusal.value)


def _write_parquet(file: Path, columns: dict[str, object], features: dict[str, object] | None = None) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table(columns)
    if features is not None:
        described = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": described})
    parquet.write_table(table, file, row_group_size=len(table) or None)


def test_a_parquet_file_opens_nothing_that_its_rows_name(tmp_path: Path) -> None:
    import pyarrow

    file = tmp_path / "a.parquet"
    secret = tmp_path / "secret"
    os.mkfifo(secret)  # whoever opens it waits for ever
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    image = pyarrow.array([{"bytes": None, "path": str(secret)}], kind)
    _write_parquet(
        file,
        {"text": ["one"], "image": image},
        {"text": {"_type": "Value", "dtype": "string"}, "image": {"_type": "Image"}},
    )
    assert train(file) == ["one"]
    assert first_rows(DocumentSource(str(file)), 1)[0]["image"] == {"bytes": None, "path": str(secret)}


def test_json_in_parquet_is_read(tmp_path: Path) -> None:
    import datasets

    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no JSON")
    file = tmp_path / "a.parquet"
    kinds = datasets.Features({"text": datasets.Value("string"), "turn": datasets.Json()})
    rows = {"text": ["one"], "turn": [{"role": "user"}]}
    datasets.Dataset.from_dict(rows, features=kinds).to_parquet(file)
    assert first_rows(DocumentSource(str(file)), 1) == [{"text": "one", "turn": {"role": "user"}}]


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    _write_parquet(file, {"text": []})
    with pytest.raises(InvalidInput, match="cannot be read: "):
        train(file)


def test_directories_give_regular_files_of_their_own_alone(tmp_path: Path) -> None:
    place = tmp_path / "texts"
    place.mkdir()
    (place / "a.jsonl").write_text(GOOD)
    (place / "b.jsonl").symlink_to("a.jsonl")
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"text": "secret"}\n')
    (place / "link.jsonl").symlink_to(secret)
    (place / "zero.jsonl").symlink_to("/dev/zero")
    (place / "broken.jsonl").symlink_to("nowhere")
    (place / "loop.jsonl").symlink_to("loop.jsonl")
    (place / "up").symlink_to(tmp_path)
    os.mkfifo(place / "fifo.jsonl")
    (place / "folder.jsonl").mkdir()
    assert [file.name for file in local_files(str(place))] == ["a.jsonl", "b.jsonl"]
    assert train(place) == [json.loads(GOOD)["text"]] * 2
    assert [file.name for file in local_files(f"{place}/*.jsonl")] == ["a.jsonl", "b.jsonl", "link.jsonl"]
    for name in ("fifo.jsonl", "zero.jsonl", "broken.jsonl", "loop.jsonl"):
        for check in (check_source, check_calibration):
            with pytest.raises(InvalidInput, match=r"is neither a .* .txt|is not none, self, stdlib, a file"):
                check(str(place / name))


def test_snapshots_of_the_hub_are_links_to_its_blobs(tmp_path: Path) -> None:
    blob = tmp_path / "datasets--a--b" / "blobs" / "0123"
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "main" / "data"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    blob.write_text(GOOD)
    (snapshot / "a.jsonl").symlink_to("../../../blobs/0123")
    (snapshot / "b.jsonl").symlink_to("../../../../outside")
    (tmp_path / "outside").write_text(GOOD)
    assert [file.name for file in local_files(str(snapshot))] == ["a.jsonl"]


@pytest.mark.parametrize("name", ["a[1]*?", "[red]a", os.fsdecode(b"\xff"), "a b%20#?", "a\nb", "..a", "hf:"])
def test_odd_names_are_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / f"{name}.jsonl").write_text(GOOD)
    assert train(folder) == [json.loads(GOOD)["text"]]
    assert calibrate(folder) == calibrate(folder / f"{name}.jsonl")


def test_no_name_at_all() -> None:
    for name in ("a\0b.jsonl", "x" * 300 + ".jsonl"):
        for check in (check_source, check_calibration):
            with pytest.raises(InvalidInput):
                check(name)


def test_a_reader_that_is_left_early_ends(tmp_path: Path) -> None:
    """No process is left behind by who reads only the beginning."""
    import psutil

    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(GOOD.encode() * 100_000))  # more than a pipe holds: the reader still runs
    assert len(first_rows(DocumentSource(str(file)), 3)) == 3
    rows = read_texts(DocumentSource(str(file)), seed=0)
    next(rows)
    readers = [child for child in psutil.Process().children() if "reader_process" in str(child.cmdline())]
    assert readers
    rows.close()
    assert not psutil.wait_procs(readers, timeout=60)[1]


def test_what_libraries_print_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come over the reader's stdout, where a module in the place of `datasets` prints at every step."""
    (tmp_path / "datasets.py").write_text(
        "print('imported')\n"
        "Dataset = None\n"
        "class rows:\n"
        "    iter = staticmethod(lambda batch_size: print('read') or iter([{'text': ['one', 'two']}]))\n"
        "def load_dataset(*given, **named):\n"
        "    print('loaded')\n"
        "    return rows\n"
        "class logging:\n"
        "    CRITICAL, set_verbosity = 50, staticmethod(lambda level: None)\n"
        "def disable_progress_bars(): print('quiet')\n"
        "class config: pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [*read_downloaded(DocumentSource("org/name"))] == [{"text": ["one", "two"]}]


def test_data_sets_of_the_hub_are_read_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash on a data set, for which a module in the place of `datasets` stands, does not end this process."""
    (tmp_path / "datasets.py").write_text(
        "import os, signal\n"
        "Dataset = None\n"
        "def load_dataset(*given, **named):\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "class logging:\n"
        "    CRITICAL, set_verbosity = 50, staticmethod(lambda level: None)\n"
        "def disable_progress_bars(): pass\n"
        "class config: pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for rows in (
        lambda: next(read_texts(DocumentSource("org/name"), seed=0)),
        lambda: list(read_downloaded(DocumentSource("org/name"))),
    ):
        with pytest.raises(InvalidInput, match="org/name cannot be read: its reader crashed on it"):
            rows()
