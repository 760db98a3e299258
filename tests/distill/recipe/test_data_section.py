"""The data section of a recipe: one text or a weighted list, and mistakes in it told in one sentence."""

import re
from pathlib import Path

import pytest
import yaml

from kvfold.core.errors import InvalidInput
from kvfold.distill.recipe.data_section import Data
from kvfold.distill.recipe.recipe_file import as_recipe

from ...support.distillation import rows

GOOD = {
    "schema": 1, "student": "./student", "output": "./out", "stages": [{"name": "kl", "tokens": "5M",
                                                                        "lr": 5e-5}],
}  # fmt: skip


def read(tmp_path: Path, data: object, *overrides: str) -> Data:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "data": data}), encoding="utf-8")
    return as_recipe(file, overrides=overrides).data


def test_what_a_source_leaves_open_is_as_the_section_says(tmp_path: Path) -> None:
    mixture = [
        {"source": "stdlib"},
        {"source": "org/chat", "weight": 3, "split": "sft", "messages_field": "messages"},
    ]
    data = read(tmp_path, {"source": mixture, "text_field": "body", "seq_len": 128})
    code, chat = data.sources
    assert (code.weight, code.split, code.text_field, code.messages_field) == (1, "train", "body", None)
    assert (chat.weight, chat.split, chat.messages_field) == (3, "sft", "messages")
    assert Data.model_validate(data.model_dump(mode="json")) == data
    # The other way round: conversations by default, one source of text.
    mixture = [{"source": "org/chat"}, {"source": "stdlib", "text_field": "text"}]
    chat, code = read(tmp_path, {"source": mixture, "messages_field": "messages", "seq_len": 128}).sources
    assert (chat.messages_field, code.messages_field, code.text_field) == ("messages", None, "text")
    both = read(tmp_path, {"source": ["a/b", "stdlib"], "seq_len": 128}).sources
    assert [source.source for source in both] == ["a/b", "stdlib"]
    (alone,) = read(tmp_path, {"source": "stdlib", "seq_len": 128}).sources
    found = (alone.source, alone.split, alone.text_field, alone.messages_field)
    assert found == ("stdlib", "train", "text", None)


def test_overrides_reach_into_a_mixture(tmp_path: Path) -> None:
    mixture = {"source": [{"source": "stdlib"}], "seq_len": 128}
    data = read(tmp_path, mixture, "data.source.0.weight=2", "data.packing=stream")
    assert (data.sources[0].weight, data.packing) == (2, "stream")


MISTAKES = """
{source: []} -> data.source is []; it should have at least one entry
{source: 3} -> data.source is 3; it should be the name of a text, or a list of texts such as {source: stdlib
{source: [3]} -> data.source[0] is 3; it should be a
{source: [{source: a, weight: 0}]} -> data.source[0].weight is 0; it should be greater than 0
{source: [{source: a, wieght: 1}]} -> unknown key 'wieght' in data.source[0]; did you mean 'weight'?
{source: [{source: a, ratio: 1}]} -> unknown key 'ratio' in data.source[0]; did you mean 'weight'?
{source: [{weight: 1}]} -> data.source[0].source is missing: The text, as in `data.source`
{source: a, weight: 1} -> unknown key 'weight' in data; it belongs in data.source
{source: a, text: b} -> unknown key 'text' in data; did you mean 'text_field'?
{source: a, packing: pack} -> data.packing is 'pack'; it should be 'documents' or 'stream'
{source: a, text_field: b, messages_field: c} -> recipe.yaml: data: text_field and messages_field are both
{source: [{source: a, text_field: b, messages_field: c}]} -> data.source[0]: text_field and messages
"""


@pytest.mark.parametrize(("data", "message"), rows(MISTAKES))
def test_mistakes_are_named(tmp_path: Path, data: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        read(tmp_path, {**yaml.safe_load(data), "seq_len": 128})
