"""Rates of refinement where a source has many layers: tried on a few, taken over by those between them."""

from pathlib import Path

import pytest

from kvfold.checkpoints.record import read_record
from kvfold.convert.efforts import MEASURED
from kvfold.convert.methods import refinement
from kvfold.convert.settle import rates

from ...support.folds import convert
from ...support.tiny import make

WORDS = [
    "--to", "mla", "--rank", "9", "--rope-dim", "4", "--length", "12", "--sequences", "4", "--refine", "3",
]  # fmt: skip


def test_layers_in_between_take_the_smaller_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source", num_hidden_layers=MEASURED + 1)
    trials, given = [], {0: 0, 2: 1, 4: 3, 6: 2, 8: 2}
    tried = rates._tried

    def counted(plan: object) -> dict[int, int]:
        assert tried(plan).keys() == given.keys()  # type: ignore[arg-type]
        trials.clear()
        return given

    trial = refinement._quarters
    monkeypatch.setattr(refinement, "_quarters", lambda *which: (trials.append(which), trial(*which))[1])
    monkeypatch.setattr(rates, "_tried", counted)
    convert(source, *WORDS, code=0)
    assert trials == [], "a layer tried rates by itself"
    record = read_record(tmp_path / "out")
    found = [layer["measured"]["quarters"] for layer in record["layers"]]
    assert found == [0, 1, 1, 3, 3, 3, 2, 2, 2]


def test_few_layers_try_rates_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source", num_hidden_layers=2)
    monkeypatch.setattr(rates, "_tried", lambda _: pytest.fail("rates were tried apart"))
    assert convert(source, *WORDS).exit_code == 0
