"""Calibration on half own text and half of another: `self+TEXT`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor

from kvfold.convert.calibration.self_text import packed
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.core.errors import InvalidInput
from kvfold.models.causal_lm import load_tokenizer
from kvfold.texts.corpus import read_text
from kvfold.texts.documents import read_sequences

from ...support.folds import convert

DEMO = Path(__file__).parents[3] / "recipes" / "demo"
TAKEN: dict[str, Any] = {"length": 24, "seed": 0}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("\n".join(read_text("stdlib").documents)[:50_000])
    return file


def taken(calibration: str, sequences: int, save: Path | None = None) -> Statistics:
    statistics = study(open_source(DEMO), calibration, sequences=sequences, save=save, **TAKEN)
    assert statistics is not None
    return statistics


def ids(statistics: Statistics) -> Tensor:
    return statistics.ids_BT


@pytest.mark.parametrize("sequences", [4, 5])
def test_own_and_other_sequences_take_turns(text: Path, sequences: int) -> None:
    half = sequences // 2
    mixed = taken(f"self+{text}", sequences)
    assert torch.equal(ids(mixed)[0::2], ids(taken("self", sequences - half)))
    read_BT = read_sequences(text, load_tokenizer(DEMO), sequences=half, **TAKEN)
    assert torch.equal(ids(mixed)[1::2], read_BT)
    assert mixed.tokens == sequences * TAKEN["length"]
    assert mixed.calibration == "self+text:words.txt"


def test_statistics_of_both_are_saved_and_used_again(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "both.safetensors"
    first, again = (taken(f"self+{text}", 4, file) for _ in range(2))
    assert first.fingerprint() == again.fingerprint()
    with pytest.raises(InvalidInput, match="exists and nothing is overwritten"):
        taken(str(text), 4, file)


def test_the_command_takes_it(text: Path, tmp_path: Path) -> None:
    def fold(calibration: str, *options: str) -> Result:
        words = ("--to", "mla", "--rank", "32", "--refine", "0", "--length", "24", "--json", *options)
        return convert(DEMO, *words, "--calibration", calibration, out=tmp_path / "out")

    for calibration, options, reason in (
        (f"self+{text}", ("--sequences", "1"), "--sequences 1 leaves --calibration self+"),
        ("self+none", (), "--calibration self+none: behind self+ should be stdlib, a file"),
        ("self+self", (), "behind self+ should be"),
        ("self+", (), "behind self+ should be"),
        ("self+absent.safetensors", (), "behind self+ should be"),
    ):
        result = fold(calibration, *options)
        assert result.exit_code == 2, calibration
        assert reason in result.output
        assert not (tmp_path / "out").exists()
    result = fold(f"self+{text}", "--sequences", "4")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["calibration"]["text"] == "self+text:words.txt"
    assert f"--calibration self+{text}" in record["command"]


@pytest.mark.parametrize("eos", [9, None])
def test_every_second_sequence_begins_anywhere_and_goes_on_with_another(eos: int | None) -> None:
    text_BT = torch.arange(1, 41).view(5, 8) * 10
    made_BT = packed(text_BT, eos, seed=0)
    assert torch.equal(made_BT[0::2], text_BT[0::2])
    for row, following in ((1, 3), (3, 1)):
        cut = text_BT[row].tolist().index(int(made_BT[row, 0]))
        mark = [] if eos is None else [eos]
        whole = [*text_BT[row, cut:].tolist(), *mark, *text_BT[following].tolist()]
        assert cut > 0
        assert made_BT[row].tolist() == whole[:8]
    assert torch.equal(packed(text_BT, eos, seed=0), made_BT)
    assert not torch.equal(packed(text_BT, eos, seed=1), made_BT)


def test_a_document_that_begins_with_the_mark_gets_no_second_one() -> None:
    text_BT = torch.tensor([[9, 1, 2], [9, 3, 4]])
    assert (packed(text_BT, 9, seed=0) == 9).sum(1).tolist() == [1, 1]
    assert torch.equal(packed(text_BT[:1], 9, seed=0), text_BT[:1])
