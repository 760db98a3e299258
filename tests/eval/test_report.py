"""eval.json: its schema, whose checkpoint it is of, and that it holds what the table shows."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ConfigDict, Field, TypeAdapter, create_model

from kvfold.checkpoints.eval_json import BLOCKS, MeasuredCheckpoint, TextProtocol, read_report
from kvfold.checkpoints.identity import hashes_of, identity
from kvfold.checkpoints.record import describe, write_record
from kvfold.core.errors import InvalidInput
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.subject import measured_checkpoint
from kvfold.eval.suites.catalogue import SuiteSettings
from kvfold.texts.corpus import Text

from .conftest import Make

OPTIONS = Options(device="cpu", window=32)
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
SCHEMA = create_model(
    "Report",
    __config__=STRICT,
    version=(Literal[2], Field(alias="schema")),
    checkpoint=(MeasuredCheckpoint, ...),
    teacher=(MeasuredCheckpoint | None, ...),
    parent=(MeasuredCheckpoint | None, ...),
    protocol=(TextProtocol | None, ...),
    suites=(dict[str, Any], ...),
    device=(str, ...),
    versions=(dict[str, str], ...),
    cache_dtype=(str | None, ...),
)


def check_schema(report: dict[str, Any]) -> None:
    text = json.dumps(report, allow_nan=False)
    SCHEMA.model_validate_json(text)
    for name, block in report["suites"].items():
        if block is not None:
            found: Any = TypeAdapter(BLOCKS[name]).validate_json(json.dumps(block), strict=True)
            assert TypeAdapter(BLOCKS[name]).dump_python(found, mode="json") == json.loads(
                json.dumps(block)
            ), name


def test_the_report_follows_its_schema_with_and_without_a_teacher(mha: Path, other: Path, text: Text) -> None:
    for result in (
        evaluate(mha, other, text, OPTIONS, other),
        evaluate(mha, None, text, OPTIONS),
        evaluate(mha, None, Text("short", (text.joined[:31],)), OPTIONS),  # a single window
        evaluate(mha, other, text, Options(device="cpu", window=32, cache_dtype="nvfp4"), other),
    ):
        report = result.to_json()
        check_schema(report)
        assert (report["schema"], set(report["versions"])) == (2, {"kvfold", "torch", "transformers"})
        assert report["suites"]["fidelity"] is None or result.teacher is not None


def test_the_table_has_a_cell_for_each_model_in_every_line(mha: Path, other: Path, text: Text) -> None:
    for parent, columns in (
        (other, ["", "student", "teacher", "parent"]),
        (None, ["", "student", "teacher"]),
    ):
        options = Options(device="cpu", window=32, cache_dtype="int8")
        result = evaluate(mha, other, text, options, parent, settings=SuiteSettings(memory=10**9))
        assert result.columns == columns
        assert {len(row) for row in result.rows} == {len(columns)}
        assert all(isinstance(cell, str) for row in result.rows for cell in row)


def test_every_line_of_the_table_is_explained(mha: Path, other: Path, text: Text) -> None:
    page = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in page.replace("\\|", "|").splitlines() if line.startswith("| `")]
    labels = [label for cell in cells for label in re.findall("`([^`]+)`", cell)]
    known = [re.sub(r"\b(DTYPE|FORMAT|SIZE)\b|\bN(?=k)", ".+", re.escape(label)) for label in labels]
    options = Options(device="cpu", window=32, cache_dtype="int8")
    settings = {"memory": 10**9}
    found = [
        evaluate(mha, other, text, options, other, settings=SuiteSettings.read(settings)),
        evaluate(mha, other, text, OPTIONS, settings=SuiteSettings.read(settings)),
    ]
    lines = {row[0].strip() for result in found for row in result.rows}
    assert {line for line in lines if not any(re.fullmatch(label, line) for label in known)} == set()
    assert len(lines) > 25


def test_the_checkpoint_is_named_by_its_hash_and_by_its_record(make: Make, mha: Path) -> None:
    directory = make(seed=7)
    before = identity(hashes_of(directory))
    lines = [
        f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
    assert before == hashlib.sha256("".join(lines).encode()).hexdigest()
    record = {
        "schema": 1, "stage": "convert", "source": describe(mha, None), "parents": [], "version": "9",
        "method": "svd",
    }  # fmt: skip
    write_record(directory, record)
    (directory / "eval.json").write_text("{}")
    (directory / "README.md").write_text("a card")
    found = measured_checkpoint(directory, hashes_of(directory))
    assert (found.identity, found.record) == (before, {"stage": "convert", "version": "9", "method": "svd"})
    (directory / "config.json").write_text((directory / "config.json").read_text() + " ")
    assert identity(hashes_of(directory)) != before
    assert measured_checkpoint(mha, {}).record is None


@pytest.mark.parametrize(
    "name",
    ["vocab.json", "vocab.txt", "merges.txt", "qwen.tiktoken", "added_tokens.json", "hf_quant_config.json"],
)
def test_every_file_of_tokens_and_of_numbers_decides_the_identity(make: Make, name: str) -> None:
    directory = make(seed=7)
    found = [identity(hashes_of(directory))]
    for content in ("{}", '{"a": 0}'):
        (directory / name).write_text(content)
        found.append(identity(hashes_of(directory)))
    assert len(set(found)) == 3


def test_the_report_of_a_copy_is_that_of_the_original(make: Make, text: Text, tmp_path: Path) -> None:
    """While the original exists; one of another checkpoint is refused."""
    original, copy = make(seed=3), tmp_path / "copy"
    (original / "eval.json").write_text(json.dumps(evaluate(original, None, text, OPTIONS).to_json()))
    shutil.copytree(original, copy)
    assert read_report(copy / "eval.json", copy) == read_report(original / "eval.json", original)
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    with pytest.raises(InvalidInput, match="was measured on"):
        read_report(copy / "eval.json", copy)


def test_a_checkpoint_in_the_hubs_cache_is_named_as_there(make: Make, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    make(seed=8).rename(snapshot)
    assert measured_checkpoint(snapshot, {}).name == "org/name"
