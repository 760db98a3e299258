"""Directories that hold a model in another form are named as that."""

from pathlib import Path

import pytest

import kvfold
from kvfold.checkpoints.directory import read_config
from kvfold.checkpoints.other_forms import without_config
from kvfold.core.errors import InvalidInput
from kvfold.core.hub import resolve


@pytest.mark.parametrize(("file", "words"), [
    ("adapter_config.json", "holds an adapter, not a model; merge it into its base model"),
    ("model-Q4_K_M.gguf", "has no config.json but model-Q4_K_M.gguf; kvfold reads safetensors"),
    ("checkpoint-500/config.json", "give a directory in it that has: {}/checkpoint-500"),
    ("notes.txt", "has no config.json; give the directory of a Hugging Face checkpoint"),
])  # fmt: skip
def test_the_sentence_says_what_there_is_instead(file: str, words: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(InvalidInput) as mistake:
        read_config(tmp_path)
    assert words.format(tmp_path) in str(mistake.value)


def test_an_adapter_is_neither_published_nor_distilled(tmp_path: Path) -> None:
    """Both look for a kvfold.json first, of which an adapter needs none."""
    (tmp_path / "adapter_config.json").write_text("{}")
    sentence = "holds an adapter, not a model; merge it into its base model"
    with pytest.raises(InvalidInput, match=sentence):
        kvfold.publish(tmp_path, "me/model", dry_run=True)
    with pytest.raises(InvalidInput, match=sentence):
        kvfold.train(tmp_path)


def test_names_in_a_sentence_stay_on_its_line(tmp_path: Path) -> None:
    (tmp_path / "a\nb.gguf").touch()
    assert "a\\nb.gguf" in without_config(tmp_path)


def test_a_file_in_gguf_is_called_that(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(InvalidInput, match=r"is a GGUF file, .* reads safetensors; give the directory"):
        resolve(str(file))
