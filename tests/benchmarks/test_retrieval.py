"""The source that retrieves: what it is trained on, and that it can be trained, folded and measured."""

import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import retrieval, retrieval_source
from benchmarks.retrieval_source import EOS, Stage, Windows, make_tokenizer, train
from kvfold.eval.suites.haystack import NAMES

TEXT = "\n".join(
    f"Some words about {one} and other things, which nobody reads more than {number} times.\n"
    for number, one in enumerate(["paper", "stone", "water", "light", "copper", "winter", *NAMES] * 20)
)
SMALL = (Stage(2, 2, 32, 1.0, (1e-3, 1e-3)), Stage(2, 2, 192, 0.5, (1e-3, 1e-4), asks=4, restarts=True))


@pytest.fixture(scope="module")
def windows() -> Windows:
    return Windows(TEXT, make_tokenizer(TEXT))


def test_every_question_is_answered_by_a_number_that_stands_before_it(windows: Windows) -> None:
    tokenizer = windows._tokenizer
    asked, stage = 0, Stage(1, 1, 300, 0.0, (1e-3, 1e-3), plain=3, edges=0.25, asks=2)
    for seed in range(20):
        row, weights = windows._questions(stage, random.Random(seed))
        assert len(row) == len(weights) == 300
        assert row[0] == tokenizer.convert_tokens_to_ids(EOS)
        answers = [at for at in range(300) if weights[at] > 1 and weights[at - 1] == 1]
        for at in answers:
            end = next(place for place in range(at, 301) if place == 300 or weights[place] == 1)
            key = tokenizer.decode(row[at:end]).strip()
            before = tokenizer.decode(row[:at])
            question = before.rpartition("\n")[2]
            assert key.isdigit()
            assert len(key) == 5
            assert f"{question.replace('The', ' The', 1)} {key}." in before
            asked += 1
    assert asked > 40


def test_names_of_the_suite_are_in_no_question(windows: Windows) -> None:
    assert not set(windows._names) & set(NAMES)


def test_repeated_tokens_fill_a_window(windows: Windows) -> None:
    row, _ = windows._repeated(64, random.Random(1))
    size = next(size for size in range(6, 65) if row[size:] == row[: 64 - size])
    assert size <= 24


def test_calibration_text_has_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "load_tokenizer", lambda _: make_tokenizer(TEXT))
    text = retrieval.with_questions(TEXT, tmp_path, sequences=2, length=300)
    asked = re.findall(r"\nThe secret number( of the \w+)? is (\d{5})", text)
    assert len(asked) >= 5
    assert all(f" The secret number{name} is {key}." in text for name, key in asked)


def test_training_writes_the_same_weights_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(tmp_path / name, TEXT, SMALL)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    fresh = retrieval_source.new_model(len(make_tokenizer(TEXT))).state_dict()
    assert not torch.equal(one["model.norm.weight"], fresh["model.norm.weight"])
