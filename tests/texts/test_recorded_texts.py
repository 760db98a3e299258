"""The same windows and documents from the same texts as when these digests were recorded."""

import bz2
import gzip
import hashlib
import json
import lzma
import random
from pathlib import Path

import pytest

from kvfold.texts.documents import read_sequences
from kvfold.texts.sources import DocumentSource, first_rows, read_texts

from ..support.tokenizers import characters

# By file: of calibration windows with the seeds 0 and 3, of training documents with both, of the first rows.
RECORDED = {
    "a.txt": ("c106d9938d88d02c", "aaa270a9c9d2ef87", "00e92120fa4f3ac0", "00e92120fa4f3ac0",
              "576c9f3567d01160"),
    "a.jsonl": ("37918c3d85b6bf73", "6ff61c57771e83e1", "44bb1256f98e0d71", "0fc950e2db32202e",
                "9d6b5c39e2a8cc8d"),
    "a.json": ("cada6e06d0ff6a81", "dff25261b51e6079", "44bb1256f98e0d71", "0fc950e2db32202e",
               "9d6b5c39e2a8cc8d"),
    "list.json": ("cada6e06d0ff6a81", "dff25261b51e6079", "44bb1256f98e0d71", "0fc950e2db32202e",
                  "ecd8d114dabf3474"),
    "a.jsonl.gz": ("37918c3d85b6bf73", "6ff61c57771e83e1", "44bb1256f98e0d71", "0fc950e2db32202e",
                   "9d6b5c39e2a8cc8d"),
    "a.txt.xz": ("c106d9938d88d02c", "aaa270a9c9d2ef87", "00e92120fa4f3ac0", "00e92120fa4f3ac0",
                 "576c9f3567d01160"),
    "a.json.bz2": ("cada6e06d0ff6a81", "dff25261b51e6079", "44bb1256f98e0d71", "0fc950e2db32202e",
                   "9d6b5c39e2a8cc8d"),
    "a.parquet": ("cada6e06d0ff6a81", "dff25261b51e6079", "44bb1256f98e0d71", "0fc950e2db32202e",
                  "ecd8d114dabf3474"),
    "dir": ("8820d5bb59f5b01e", "23c1c06a9f616060", "4b5bd8e7695b60d3", "649fa801bac611a5",
            "9d6b5c39e2a8cc8d"),
    "txts": ("d5ece485e5f5ffb7", "fd112afcfd3bd69a", "b11272179c017901", "ac5440adb680cfd8",
             "6482dd079ea7e5b6"),
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 300 documents in every kind of file."""
    from datasets import Dataset

    root = tmp_path_factory.mktemp("corpus")
    rng = random.Random(7)
    documents = ["".join(rng.choices("abcdefgh", k=rng.randrange(5, 400))) for _ in range(300)]
    documents[5] = ""
    rows = [json.dumps({"text": document, "n": n}) + "\n" for n, document in enumerate(documents)]
    lines = "".join(rows).encode()
    text = "".join(documents).encode()
    content = {
        "a.txt": text,
        "a.jsonl": lines,
        "a.json": lines,
        "list.json": json.dumps([{"text": document} for document in documents]).encode(),
        "a.jsonl.gz": gzip.compress(lines),
        "a.txt.xz": lzma.compress(text),
        "a.json.bz2": bz2.compress(lines),
    }
    for part, name in enumerate(("0.jsonl", "sub/1.jsonl", "2.jsonl")):
        content[f"dir/{name}"] = "".join(rows[part * 100 : part * 100 + 100]).encode()
        content[f"txts/{part}.txt"] = "".join(documents[part * 100 : part * 100 + 100]).encode()
    for name, data in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    Dataset.from_dict({"text": documents}).to_parquet(root / "a.parquet")
    return root


@pytest.mark.usefixtures("warm_probe")
@pytest.mark.parametrize("name", RECORDED)
def test_texts_are_as_recorded(corpus: Path, name: str) -> None:
    source = DocumentSource(str(corpus / name))
    found = []
    for seed in (0, 3):
        windows = read_sequences(corpus / name, characters(), sequences=20, length=64, seed=seed)
        found.append(windows.numpy().tobytes())
    for seed in (0, 3):
        documents = [text for texts in read_texts(source, seed) for text in texts]
        found.append(json.dumps(documents).encode())
    found.append(json.dumps(first_rows(source, 10)).encode())
    assert tuple(hashlib.sha256(content).hexdigest()[:16] for content in found) == RECORDED[name]
