"""A calibrated fold: statistics in, slots and a divided budget out, and a loss that was predicted."""

import json
import math
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from kvfold.convert.algebra.rotary import frequencies
from kvfold.convert.cli import main
from kvfold.convert.families.source import open_source
from kvfold.convert.methods.allocation import allocate
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.texts.corpus import read_text

from ...support.folds import convert as run
from ...support.tiny import make, same_bytes

DEMO = Path(__file__).parents[3] / "recipes" / "demo"


def convert(source: Path, *options: str, out: Path, code: int | None = None) -> Result:
    return run(source, "--to", "mla", *options, "--json", out=out, code=code)


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
    taken = ("--calibration", "self", "--sequences", "12", "--length", "128", "--save-statistics", str(file))
    assert convert(DEMO, "--kv-budget", "25%", "--refine", "0", *taken, out=root / "out").exit_code == 0
    return file


def test_predicted_and_measured_losses_agree(tmp_path: Path, saved_statistics: Path) -> None:
    """Predicted losses rank as measured ones; for MLA they are near them while they are small."""
    text = read_text("stdlib")
    options = Options(window=256, max_windows=6, teacher_cache=tmp_path / "teacher")
    grid = [("mla", "--kv-budget", budget) for budget in ("50%", "25%", "12.5%")]
    grid += [("gqa", "--kv-heads", "2"), ("mqa",)]
    predicted, measured = [], []
    for number, target in enumerate(grid):
        is_latent = target[0] == "mla"
        arguments = ("--to", *target, "--calibration", str(saved_statistics), "--refine", "0", "--json")
        result = run(DEMO, *arguments, out=tmp_path / str(number), code=0)
        record = json.loads(result.stdout)
        for layer in record["layers"]:
            found = layer["measured"]
            if is_latent:  # what is written differs from the closed form by the norm's fit
                assert found["refined"] == pytest.approx(found["folded"], rel=0.2)
            else:
                assert found["refined"] == found["folded"]
        assert [set(layer["planned"] or ()) for layer in record["layers"]] == [
            {"slots", "latent"} if is_latent else set()
        ] * 6
        predicted.append(record["predicted_loss"])
        lost = evaluate(tmp_path / str(number), DEMO, text, options, suites=("ppl",)).ppl.difference
        measured.append(lost.mean)
    ranks = torch.tensor([predicted, measured]).argsort(1).argsort(1).double()
    # Spearman's: 0.9 where two neighbours change places.
    assert torch.corrcoef(ranks)[0, 1] > 0.899, (predicted, measured)
    assert 0.4 < predicted[0] / measured[0] < 2.5


def test_refined_loses_less_than_calibrated_than_weights(tmp_path: Path, saved_statistics: Path) -> None:
    text = read_text("stdlib")
    options = Options(window=256, max_windows=4, teacher_cache=tmp_path / "teacher")
    kl = []
    choices = ((str(saved_statistics), "--refine", "20"), (str(saved_statistics), "--refine", "0"), ("none",))
    for number, calibration in enumerate(choices):
        out = tmp_path / str(number)
        assert convert(DEMO, "--kv-budget", "25%", "--calibration", *calibration, out=out).exit_code == 0
        fidelity = evaluate(out, DEMO, text, options, suites=("fidelity",)).fidelity
        kl.append(fidelity.kl.mean)
    assert kl[0] < 0.9 * kl[1]
    assert kl[1] < 0.8 * kl[2]


def test_saved_statistics_give_the_same_bytes(tmp_path: Path) -> None:
    """Twice from the same seed, and once from the file that the first run saved."""
    source, file = make(tmp_path / "source", "qwen2"), tmp_path / "statistics.safetensors"
    sizes = ("--rank", "24", "--rope-dim", "4", "--refine", "5")
    taken = (*sizes, "--calibration", "self", "--sequences", "4", "--length", "64")
    for name, options in (
        ("one", (*taken, "--save-statistics", str(file))),
        ("two", taken),
        ("three", (*sizes, "--calibration", str(file))),
    ):
        convert(source, *options, out=tmp_path / name, code=0)
    assert same_bytes(tmp_path / "one", tmp_path / "two") == []
    # The command differs.
    assert same_bytes(tmp_path / "one", tmp_path / "three") == ["README.md", "kvfold.json"]
    loss = json.loads((tmp_path / "one" / "kvfold.json").read_text())["predicted_loss"]
    assert math.isfinite(loss)


def test_options_of_the_text_have_no_effect_on_saved_statistics(tmp_path: Path) -> None:
    """A sentence names those that differ, and what the file holds."""
    source, file, out = make(tmp_path / "source"), tmp_path / "statistics.safetensors", tmp_path / "out"
    taken = ("--rank", "9", "--refine", "0", "--sequences", "4", "--length", "16")
    assert convert(source, *taken, "--save-statistics", str(file), out=tmp_path / "one").exit_code == 0
    saved = ("--rank", "9", "--calibration", str(file), "--length", "16", "--dry-run")
    for options, sentence in (
        ((), None),
        (("--sequences", "4", "--seed", "0"), None),
        (("--sequences", "12", "--seed", "3"), "--sequences 12, --seed 3 have no effect: the statistics in "),
        (("--length", "64"), "--length 64 has no effect: the statistics in "),
    ):
        notices = json.loads(convert(source, *saved, *options, out=out).stdout)["notices"]
        found = [text for text in notices if " no effect" in text]
        held = f"{file} are of 4 sequences of 16 tokens by seed 0"
        assert found == ([] if sentence is None else [sentence + held])


@pytest.mark.parametrize("family", ["phi3", "smollm3"])
def test_ids_beyond_the_vocabulary_are_taken_as_absent(tmp_path: Path, family: str) -> None:
    """A small model of a class has the default ids of its configuration, which is for a larger vocabulary."""
    source = make(tmp_path / "source", family, bos_token_id=None, eos_token_id=None)
    config = json.loads((source / "config.json").read_text())
    config |= {"bos_token_id": 128000, "eos_token_id": [2, 128001]}
    (source / "config.json").write_text(json.dumps(config))
    taken = ("--rank", "9", "--refine", "0", "--sequences", "2", "--length", "12", "--calibration", "self")
    result = convert(source, *taken, out=tmp_path / "out", code=0)
    said = "config.json has bos_token_id 128000 and eos_token_id [2, 128001], beyond the 97 tokens of the vocabulary"
    assert any(text.startswith(said) for text in json.loads(result.stdout)["notices"])
    assert open_source(source).config["eos_token_id"] == [2]


def test_calibration_on_a_text_file(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(read_text("stdlib").documents)[:200_000])
    taken = ("--rank", "32", "--calibration", str(text), "--sequences", "2", "--refine", "0")
    result = convert(DEMO, *taken, out=tmp_path / "out", code=0)
    assert json.loads(result.stdout)["calibration"]["text"] == "text:text.txt"


def test_mistakes(tmp_path: Path) -> None:
    source, other, nowhere = make(tmp_path / "source"), tmp_path / "other.safetensors", tmp_path / "nowhere"
    small = make(tmp_path / "small", num_hidden_layers=1)
    taken = ("--rank", "9", "--calibration", "self", "--sequences", "2", "--save-statistics", str(other))
    assert convert(small, *taken, out=tmp_path / "done").exit_code == 0
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    (tmp_path / "empty").mkdir()
    for options, sentence in (
        ("--calibration nowhere.txt", "--calibration nowhere.txt is not none, self, stdlib, a file"),
        (f"--calibration {tmp_path}/bad.safetensors", "holds no statistics that kvfold wrote"),
        (f"--calibration {other}", "holds statistics of a model with"),
        ("--calibration none --save-statistics x.safetensors", "has nothing to save with --calibration none"),
        (f"--calibration self --save-statistics {other}", "exists and nothing is overwritten"),
        (f"--calibration self --save-statistics {nowhere}/s",
         f"no directory {nowhere}; make it, or name another"),
        (f"--calibration {other} --save-statistics x.safetensors", "holds saved statistics already"),
        (f"--calibration {tmp_path}/empty", "is a directory that holds no file of a known kind"),
        ("--calibration none --refine 3", "--refine 3 has no effect without calibration text"),
        ("--calibration none --slots allocated", "--slots allocated needs statistics"),
        ("--calibration none --method care", "--method care needs statistics"),
        ("--method care --refine 5", "--refine 5 does not apply to --method care"),
        ("--method svd --slots uniform", "--slots does not apply to --method svd"),
        ("--rope intact --method svd", "--method svd decouples the rotary part"),
        ("--rope intact --slots uniform", "--slots uniform does not apply here"),
    ):  # fmt: skip
        words = ("--rank", "9", *options.split())
        assert sentence in convert(source, *words, out=tmp_path / "out", code=2).output
        assert not (tmp_path / "out").exists()
    mean = ("--to", "gqa", "--kv-heads", "2", "--method", "mean")
    saving = run(source, *mean, "--save-statistics", "x.safetensors", out=tmp_path / "out", code=2)
    assert "--save-statistics does not apply to --method mean" in saving.output
    ignoring = run(source, *mean, "--calibration", "self", out=tmp_path / "mean", code=0)
    assert "--calibration self is ignored: --method mean folds by weights alone" in ignoring.output
    record = json.loads((tmp_path / "mean" / "kvfold.json").read_text())
    assert record["calibration"] is None


def test_what_is_calibrated_when_nothing_is_said(tmp_path: Path) -> None:
    """MLA on text of its own; a dry run, and what reads no statistics, by weights alone."""
    source, short = make(tmp_path / "source"), ("--sequences", "2", "--length", "8")
    said = convert(source, "--rank", "9", *short, out=tmp_path / "mla")
    record = json.loads(said.stdout)
    assert record["calibration"] == {"text": "self", "tokens": 16, "length": 8, "context": 512, "seed": 0}
    assert "--calibration self --sequences 2 --length 8 --seed 0" in record["command"]
    again = tmp_path / "again"
    command = [*shlex.split(record["command"])[2:], "--out", str(again)]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert same_bytes(tmp_path / "mla", again) == []
    none = json.loads(convert(source, "--rank", "9", "--calibration", "none", out=tmp_path / "none").stdout)
    assert none["calibration"] is None
    assert "--calibration none" in none["command"]
    dry = convert(source, "--rank", "9", "--dry-run", out=tmp_path / "dry")
    assert json.loads(dry.stdout)["calibration"] is None
    assert "planned by weights alone" in dry.stderr
    assert "may divide the budget" not in dry.stderr
    shared = convert(source, "--kv-budget", "50%", "--dry-run", out=tmp_path / "shared")
    assert "uses --calibration self and may divide the budget into another rank" in shared.stderr
    assert json.loads(convert(source, "--rank", "full", out=tmp_path / "full").stdout)["calibration"] is None
    for to in (("gqa", "--kv-heads", "8"), ("mqa", "--method", "mean")):
        done = run(source, "--to", *to, "--json", out=tmp_path / to[0])
        assert json.loads(done.stdout)["calibration"] is None
        assert "--calibration self" not in json.loads(done.stdout)["command"]
