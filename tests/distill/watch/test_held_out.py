"""Held-out text: how it is read, and that what is trained on is not taken for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvfold.core.errors import InvalidInput
from kvfold.distill.run.job import distill
from kvfold.distill.watch.held_out import _are_seen
from kvfold.texts.corpus import Text

from ...support.distillation import curve
from ..conftest import MakeRecipe


@pytest.mark.parametrize("mode", ["same", "copy", "listed", "words"])
def test_text_trained_on_is_refused(make_recipe: MakeRecipe, text: Path, tmp_path: Path, mode: str) -> None:
    source: Any = str(text)
    other = text
    if mode == "copy":
        other = tmp_path / "other.jsonl"
        other.write_bytes(text.read_bytes())
    if mode == "listed":
        source = [{"source": "stdlib"}, {"source": str(text.parent / "*.jsonl")}]
    if mode == "words":  # the same documents in another form
        other = tmp_path / "documents.txt"
        other.write_text(
            "\n\n".join(json.loads(line)["text"] for line in text.read_text().splitlines()), encoding="utf-8"
        )
    recipe = make_recipe(
        data={"source": source, "seq_len": 32}, evaluate={"source": str(other), "windows": 8}
    )
    with pytest.raises(InvalidInput, match=r"evaluate.source .* is trained on"):
        distill(recipe)
    assert not (tmp_path / "out.partial").exists()


def test_the_held_out_half_of_the_standard_library_is_apart(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(
        tokens=192, data={"source": "stdlib", "seq_len": 32}, evaluate={"source": "stdlib", "windows": 4}
    )
    assert (distill(recipe).output / "curve.json").is_file()


@pytest.mark.parametrize(("section", "message"), [
    ({"source": "missing.txt"}, "missing.txt is not a file; evaluate.source takes a file of text"),
    ({"source": "HELD", "seq_len": 65}, "evaluate.seq_len 65 exceeds the 64 positions of the student"),
    ({"source": "wikitext2-gptq-48", "seq_len": 32},
     "has windows of 48 tokens; leave out evaluate.seq_len 32"),
    ({"source": "JSONL", "text_field": "body"}, "has no field 'body'; evaluate.text_field can be text"),
])  # fmt: skip
def test_mistakes_are_named(
    make_recipe: MakeRecipe,
    held: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: dict[str, Any],
    message: str,
) -> None:
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": held.read_text()}), encoding="utf-8")
    names = {"HELD": held, "JSONL": tmp_path / "held.jsonl"}
    section["source"] = str(names.get(section["source"], section["source"]))
    if section["source"].startswith("wikitext2"):
        monkeypatch.setattr(
            "kvfold.distill.watch.held_out.read_text", lambda name, **_: Text(name, ("a",), "gptq", 48)
        )
    with pytest.raises(InvalidInput, match=message):
        distill(make_recipe(tokens=192, evaluate=section))


def test_fields_of_a_file_are_documents(make_recipe: MakeRecipe, held: Path, tmp_path: Path) -> None:
    file = tmp_path / "held.jsonl"
    file.write_text(json.dumps({"body": held.read_text()}), encoding="utf-8")
    recipes = {"plain": {"source": str(held)}, "fields": {"source": str(file), "text_field": "body"}}
    points = {}
    for name, section in recipes.items():
        distill(make_recipe(tokens=192, output=str(tmp_path / name), evaluate={**section, "windows": 4}))
        points[name] = curve(tmp_path / name)["points"]
    assert points["plain"] == points["fields"]


def test_what_is_seen_is_found_wherever_it_stands() -> None:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 50, 5000).astype(np.int32)
    probes = np.stack([tokens[0:32], tokens[1234:1266], tokens[-32:], draw.integers(0, 50, 32)]).astype(
        np.int64
    )
    assert _are_seen(probes, [tokens[:1000], tokens]) == [True, True, True, False]
    assert _are_seen(probes, [tokens[:20]]) == [False] * 4
