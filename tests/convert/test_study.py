"""A calibrated fold: statistics in, allocated slots and a divided budget out, and a predicted loss that means something."""

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from kvfold.convert.allocate import allocate
from kvfold.convert.cli import main
from kvfold.convert.rotary import frequencies
from kvfold.eval.corpus import read_text
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate

from ..tiny import make, same_bytes

DEMO = Path(__file__).parents[2] / "recipes" / "demo"


def convert(source: Path, *options: str, out: Path) -> Result:
    return CliRunner().invoke(main, [str(source), "--to", "mla", *options, "--out", str(out), "--json"])


def test_slots_go_where_they_save_most() -> None:
    table_F, _ = frequencies({"rope_type": "default", "rope_theta": 1e4}, 6, 64)
    saved_FK = torch.tensor([[5.0, 4.0, 1.0], [3.0, 0.5, 0.1], [0.2, 0.1, 0.0]], dtype=torch.float64)
    bands = allocate(saved_FK, table_F, 4)
    assert [(band.pairs, band.slots) for band in bands] == [((0,), 3), ((1,), 1)]
    assert [band.frequency for band in bands] == table_F[:2].tolist()
    assert sum(band.slots for band in allocate(saved_FK, table_F, 9)) == 9


@pytest.fixture(scope="module")
def saved_statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of the demo checkpoint, taken once on text of its own."""
    root = tmp_path_factory.mktemp("statistics")
    file = root / "demo.safetensors"
    options = ("--kv-budget", "25%", "--calibration", "self", "--sequences", "12", "--save-statistics", str(file))
    assert convert(DEMO, *options, out=root / "out").exit_code == 0
    return file


def test_predicted_and_measured_losses_agree(tmp_path: Path, saved_statistics: Path) -> None:
    """Over budgets the predicted loss ranks as the measured one, and is near it where it is small (second order)."""
    text, options = read_text("stdlib"), Options(window=256, max_windows=12)
    predicted, measured = [], []
    for budget in ("60%", "50%", "35%", "25%", "18%"):
        out = tmp_path / budget
        result = convert(DEMO, "--kv-budget", budget, "--calibration", str(saved_statistics), out=out)
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        assert record["target"]["slots"] == "allocated"
        predicted.append(record["predicted_loss"])
        lost = evaluate(out, DEMO, text, options).nll_difference
        assert lost is not None
        measured.append(lost.mean)
    assert predicted == sorted(predicted)
    assert measured == sorted(measured)
    assert 0.4 < predicted[1] / measured[1] < 2.5


def test_calibration_loses_less_than_weights_alone(tmp_path: Path, saved_statistics: Path) -> None:
    text, options = read_text("stdlib"), Options(window=256, max_windows=8)
    kl = []
    for number, calibration in enumerate((str(saved_statistics), "none")):
        out = tmp_path / str(number)
        assert convert(DEMO, "--kv-budget", "25%", "--calibration", calibration, out=out).exit_code == 0
        fidelity = evaluate(out, DEMO, text, options).fidelity
        assert fidelity is not None
        kl.append(fidelity.kl.mean)
    assert kl[0] < 0.7 * kl[1]


def test_saved_statistics_give_the_same_bytes(tmp_path: Path) -> None:
    """Twice from the same seed, and once from the file that the first run saved."""
    source, file = make(tmp_path / "source", "qwen2"), tmp_path / "statistics.safetensors"
    taken = ("--rank", "24", "--rope-dim", "4", "--calibration", "self", "--sequences", "4")
    for name, options in (
        ("one", (*taken, "--save-statistics", str(file))),
        ("two", taken),
        ("three", ("--rank", "24", "--rope-dim", "4", "--calibration", str(file))),
    ):
        result = convert(source, *options, out=tmp_path / name)
        assert result.exit_code == 0, result.output
    assert same_bytes(tmp_path / "one", tmp_path / "two") == []
    assert same_bytes(tmp_path / "one", tmp_path / "three") == ["kvfold.json"]  # the command differs
    loss = json.loads((tmp_path / "one" / "kvfold.json").read_text())["predicted_loss"]
    assert math.isfinite(loss)


def test_calibration_on_a_text_file(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(read_text("stdlib").documents)[:200_000])
    result = convert(DEMO, "--rank", "32", "--calibration", str(text), "--sequences", "2", out=tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["calibration"]["text"] == "text:text.txt"


def test_mistakes(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    other = tmp_path / "other.safetensors"
    small = make(tmp_path / "small", num_hidden_layers=1)
    assert convert(small, "--rank", "9", "--calibration", "self", "--sequences", "2", "--save-statistics", str(other),
                   out=tmp_path / "done").exit_code == 0  # fmt: skip
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    for options, sentence in (
        (("--calibration", "nowhere.txt"), "--calibration nowhere.txt is not none, self or a"),
        (("--calibration", str(tmp_path / "bad.safetensors")), "holds no statistics that kvfold wrote"),
        (("--calibration", str(other)), "holds statistics of a model with"),
        (("--save-statistics", "x.safetensors"), "has nothing to save with --calibration none"),
        (("--calibration", "self", "--save-statistics", str(other)), "exists and nothing is overwritten"),
    ):
        result = convert(source, "--rank", "9", *options, out=tmp_path / "out")
        assert result.exit_code == 2, options
        assert sentence in result.output
        assert not (tmp_path / "out").exists()
    gqa = CliRunner().invoke(main, [str(source), "--to", "gqa", "--kv-heads", "2", "--calibration", "self"])
    assert gqa.exit_code == 2
    assert "does not apply to --to gqa" in gqa.output
