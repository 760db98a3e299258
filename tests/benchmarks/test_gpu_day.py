"""The GPU day at toy size on a CPU: every part measures its rows, keeps them, and resumes.

What needs a GPU is left out here: the kernel itself, CUDA graphs, and FSDP 2 in one process.
"""

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from benchmarks import losses
from benchmarks.gpu import distil as distillation
from benchmarks.gpu import pretrained
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.ledger import Ledger, NotRun
from benchmarks.gpu.parcel import pack, unpack
from benchmarks.gpu.parts import run_part
from benchmarks.gpu.sizes import FULL, LENT, TOY, Sizes
from benchmarks.gpu.source import Training, new_model, rate_at
from benchmarks.gpu.summary import table, write_summary
from benchmarks.gpu.text import HELD, TRAIN, documents, is_held_out
from benchmarks.gpu.tokens import ASKED, Windows, make_tokenizer, make_tokens
from kvfold.cli import main as kvfold_command
from kvfold.core.errors import InvalidInput
from kvfold.distill.recipe.recipe_file import read_recipe

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a day whose part `train` is done; results are in `out`."""
    work = tmp_path_factory.mktemp("day")
    assert run_part("train", work / "out", work, 600, None, "toy") == 0
    return work


def rows(day: Path, part: str) -> dict[str, Any]:
    result = json.loads((day / "out" / f"gpu-{part}.json").read_text())
    assert not result["failed"]
    assert not result["not_run"]
    assert result["machine"]["torch"] == torch.__version__
    found: dict[str, Any] = result["rows"]
    return found


def measure(day: Path, part: str) -> dict[str, Any]:
    """Measure a part, and again, which measures nothing."""
    assert run_part(part, day / "out", day, 600, None, "toy") == 0
    first = rows(day, part)
    assert run_part(part, day / "out", day, 600, None, "toy") == 0
    assert rows(day, part) == first
    assert f"benchmarks.gpu {part}" in write_summary(day / "out")
    return first


def test_sources_are_trained_and_packed(day: Path) -> None:
    found = rows(day, "train")
    assert list(found) == ["text", "tokens", "source", "twin"]
    for name in TOY.sources:
        assert found[name]["tokens"] % (2 * TOY.window) == 0 < found[name]["tokens"]
        assert 1 < found[name]["perplexity"] < 2 * TOY.vocabulary
        assert not (day / f"{name}.state").exists()
    again = unpack(day / "out", day / "again")
    ours, theirs = (load_file(place / "model.safetensors") for place in (again, day / "twin"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_folds_are_measured(day: Path) -> None:
    found = measure(day, "fold")
    assert list(found) == ["statistics", *(f"{label} 25%" for label in TOY.folds)]
    for label in TOY.folds:
        row = found[f"{label} 25%"]
        assert row["fold_seconds"] > 0
        assert row["lost"] > -1
        assert set(row["retrieval"]) == {"student", "teacher"}


def test_distillations_are_measured(day: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this part run in this process."""

    def in_process(words: list[str], _seconds: float) -> dict[str, Any]:
        if words[0] == "benchmarks.losses":
            runs = {
                ("kl", kind): [losses.run("kl", kind, (32, 64, 16), "cpu")]
                for kind in (losses.DENSE, str(2**10))
            }
            dense, chunked = losses._rows(runs)
            assert chunked["nats"] == pytest.approx(dense["nats"], rel=1e-5)
            return {"tokens": 32, "vocabulary": 64, "hidden": 16, "rows": [dense, chunked]}
        done = CliRunner().invoke(import_module(words[0]).main, words[1:], catch_exceptions=False)
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return row

    monkeypatch.setattr(distillation, "last_object", in_process)
    found = measure(day, "distil")
    (recovery,) = (row for label, row in found.items() if label.startswith("recovery"))
    assert [point["tokens"] for point in recovery["points"]] == [0, 512, 1024]
    assert set(recovery["own_reached"]) == {"90%", "95%", "99%"}
    assert found["step all, plain"]["seconds"] > 0
    assert [row["kind"] for row in found["losses"]["losses"]] == ["dense", "chunked"]


def test_a_pretrained_source_is_measured(day: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process; the first fold keeps its statistics for the others."""
    commands = []

    def in_process(words: list[str], _seconds: float) -> str:
        commands.append(words[3:])
        return CliRunner().invoke(kvfold_command, words[3:], catch_exceptions=False).stdout

    monkeypatch.setattr(pretrained, "child", in_process)
    texts = (day / HELD, day / TRAIN)
    for _ in range(2):
        assert run_part("pretrained", day / "out", day, 600, day / "source", "toy", texts) == 0
    found = rows(day, "pretrained")
    assert list(found) == ["fold mla 50%", "fold gqa 1 head", "training mla 50%"]
    assert [words[0] for words in commands] == ["convert", "eval", "convert", "eval", "distill"]
    assert "--save-statistics" in commands[0]
    assert "--calibration" in commands[2]
    assert found["fold mla 50%"]["losses"]["64"]["lost"] > -1
    assert [point["tokens"] for point in found["training mla 50%"]["points"]] == [256, 512]
    assert "| mla 50% | 512 |" in write_summary(day / "out")


def test_a_large_model_is_folded_by_command(day: Path) -> None:
    found = measure(day, "large")
    assert list(found) == ["model", "fold mla 50%"]
    row = found["fold mla 50%"]
    assert row["seconds"] >= row["lines"][-1][0] > 0
    assert row["predicted_cpu_seconds"] > 0
    assert not (day / "large-mla-50").exists()


def test_a_launchers_report_does_not_hide_the_error() -> None:
    """torchrun writes a report with a line of = signs below the traceback of its process."""
    said = "Traceback:\n[rank0]: IndexError: tuple index out of range\nFAILED\n====\n"
    program = f"import sys; sys.stderr.write({said!r}); sys.exit(1)"
    with pytest.raises(RuntimeError, match=r"IndexError: tuple index out of range"):
        distillation.child([sys.executable, "-c", program], 60)
    with pytest.raises(RuntimeError, match="exit code 3"):
        distillation.child([sys.executable, "-c", "raise SystemExit(3)"], 60)


def late(words: list[str], _seconds: float) -> str:
    """Stand for a child process that the time ends."""
    raise subprocess.TimeoutExpired(words, 1)


def test_a_training_that_the_time_ends_keeps_its_points(
    day: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has the points until then; without any, it fails."""

    monkeypatch.setattr(pretrained, "child", late)
    given = (100.0, TOY, tmp_path, day / "source", day / HELD, day / TRAIN)
    with pytest.raises(InvalidInput, match="no fold mla 50% to train"):
        pretrained.trained(*given, "mla 50%")
    (tmp_path / "mla-50").mkdir()
    with pytest.raises(RuntimeError, match="before its first step"):
        pretrained.trained(*given, "mla 50%")

    def stopped(words: list[str], seconds: float) -> str:
        partial = tmp_path / "trained-mla-50.partial"
        partial.mkdir()
        lines = json.dumps({"step": 8, "tokens": 2048, "kl": 0.5}) + '\n{"step": 16, "tok'
        (partial / "metrics.jsonl").write_text(lines)
        return late(words, seconds)

    monkeypatch.setattr(pretrained, "child", stopped)
    row = pretrained.trained(*given, "mla 50%")
    assert row["stopped"]
    assert row["points"] == [{"tokens": 2048, "kl": 0.5}]


def test_a_fold_that_the_time_ends_is_measured_again(
    day: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other one takes the statistics that it should have left."""

    monkeypatch.setattr(pretrained, "child", late)
    texts = (day / HELD, day / TRAIN)
    assert run_part("pretrained", tmp_path / "out", tmp_path, 100, day / "source", "toy", texts) == 0
    result = json.loads((tmp_path / "out" / "gpu-pretrained.json").read_text())
    assert result["not_run"]["fold mla 50%"].startswith("the time ended")
    assert "has not left its statistics" in result["not_run"]["fold gqa 1 head"]
    assert not result["rows"]


def test_the_kernel_is_measured(day: Path) -> None:
    found = measure(day, "kernel")
    kinds = [label.split()[0] for label in found]
    assert kinds.count("check") == 1
    assert kinds.count("agreement") == 11
    assert kinds.count("step") == 2
    (speed,) = (row for label, row in found.items() if label.startswith("speed"))
    assert speed["bytes_per_token"] == {"plain": 80, "gqa": 2 * 128 * 2, "mha": 4 * 2 * 128 * 2}
    assert speed["share_of_copy"]["plain"] > 0


def test_the_full_day_measures_every_cell_of_the_issue() -> None:
    cells = {(context, batch) for *_, context, batch in FULL.speeds}
    assert cells == {(context, batch) for context in (8192, 32768, 131072) for batch in (1, 8, 64)}
    assert set(FULL.budgets) == {"50%", "25%", "12.5%"}
    assert 150e6 < parameters(FULL, "source") < 300e6


def test_what_is_carried_home_fits() -> None:
    """In bfloat16, next to its tokenizer and results: 64 MiB in all."""
    for sizes in (FULL, LENT):
        assert 2 * parameters(sizes, sizes.carried) < 60 * 2**20


def parameters(sizes: Sizes, name: str) -> int:
    with torch.device("meta"):
        tokenizer: Any = type(
            "Named", (), {"bos_token_id": 0, "eos_token_id": 0, "__len__": lambda _: sizes.vocabulary}
        )()
        model = new_model(sizes.sources[name], tokenizer, sizes.window)
    return sum(weight.numel() for weight in model.parameters())


def test_a_failure_does_not_end_a_part(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("the first line\nthe second")

    def leave_out() -> dict[str, Any]:
        raise NotRun("the package is not installed here")

    class CompilerError(Exception):
        """As of Triton, which is no RuntimeError."""

    def compile_it() -> dict[str, Any]:
        raise CompilerError("out of resources")

    ledger = Ledger("kernel", "toy", tmp_path, tmp_path / "out", 100)
    assert ledger.attempt("zero", compile_it) is None
    assert ledger.failed.pop("zero") == "CompilerError: out of resources"
    assert ledger.attempt("one", fail) is None
    assert ledger.attempt("two", leave_out) is None
    assert ledger.attempt("three", lambda: {"value": 3}) is not None
    assert ledger.attempt("four", lambda: {"value": 4}, needs=1000) is None
    kept = json.loads((tmp_path / "out" / "gpu-kernel.json").read_text())
    assert kept["failed"] == {"one": "RuntimeError: the first line"}
    assert kept["not_run"]["two"] == "the package is not installed here"
    again = Ledger("kernel", "toy", tmp_path, tmp_path / "out", 100)
    assert again.attempt("three", fail) == kept["rows"]["three"]
    assert again.attempt("four", lambda: {"value": 4}) is not None
    with pytest.raises(InvalidInput, match="sizes toy, not full"):
        Ledger("kernel", "full", tmp_path, tmp_path / "out", 100)


def test_windows_copy_and_ask(day: Path) -> None:
    tokenizer = make_tokenizer(day, TOY.vocabulary)
    windows = Windows(make_tokens(day, tokenizer), tokenizer, 1024, "cpu")
    first_BS, again_BS = windows.batch(0, 8), windows.batch(0, 8)
    assert torch.equal(first_BS, again_BS)
    assert torch.equal(first_BS[1, :512], first_BS[1, 512:])
    assert not torch.equal(first_BS[0, :512], first_BS[0, 512:])
    text = tokenizer.decode(first_BS[5])
    answers = [line.split(" is ") for line in text.split("\n")[-ASKED:]]
    assert len(answers) == ASKED
    for question, key in answers:
        assert f"{question} is {key}." in text, "the window answers what it asks"


def test_a_stopped_training_resumes(day: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(day, TOY.vocabulary)
    windows = Windows(make_tokens(day, tokenizer), tokenizer, 64, "cpu")
    sizes = TOY.sources["twin"]

    def begin(name: str) -> Training:
        return Training(sizes, windows, new_model(sizes, tokenizer, 64), tmp_path / name)

    whole, stopped = begin("whole"), begin("stopped")
    expected = [float(whole.step(1e-3)) for _ in range(4)]
    found = [float(stopped.step(1e-3)) for _ in range(2)]
    stopped.save()
    resumed = begin("stopped")
    found += [float(resumed.step(1e-3)) for _ in range(2)]
    assert found == expected
    assert resumed.progress.steps == 4


def test_the_rate_warms_up_and_falls() -> None:
    rates = [rate_at(share, 1.0) for share in (0.0, 0.015, 0.03, 0.5, 1.0, 1.5)]
    assert rates[2] == 1.0
    assert 0 < rates[0] < rates[1] < rates[2] > rates[3] > rates[4] == rates[5] > 0


def test_no_package_is_in_both_texts(tmp_path: Path) -> None:
    names = [f"package{number}" for number in range(60)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.py").write_text(f"# {name}\n" * 50)
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "README.md").write_text(f"{name}, described\n" * 50)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "file.py").write_text(f"# {names[0]}\n" * 50)
    held, trained = ("".join(documents([tmp_path], part, 10**6)) for part in (True, False))
    assert held
    for name in names:
        assert (f"# {name}\n" in held, f"{name}, described\n" in held) == (is_held_out(name),) * 2
        assert (f"# {name}\n" in trained) != is_held_out(name) or name == names[0]
    assert len("".join(documents([tmp_path], False, 5000))) <= 5000


def test_the_recipe_of_a_profile_is_one(day: Path) -> None:
    grid = distillation.make_grid(TOY, day, day / "source")
    file = distillation.write_recipe(grid, day / "source", day / "student", grid.work)
    recipe = read_recipe(file)
    assert recipe.teacher == str(day / "source")
    assert recipe.steps(recipe.stages[0]) == 8
    assert recipe.evaluate is None


def test_the_table_counts_tokens_to_shares_of_the_plain_loss() -> None:
    def row(start: str, *perplexities: float) -> dict[str, Any]:
        points = [
            {"tokens": 100 * number, "perplexity": value, "kl": 0.0}
            for number, value in enumerate(perplexities)
        ]
        own = {"target": "mla 25%", "start": start, "recipe": "kl", "seed": 0, "rates": {"kl": 1e-4}}
        return {**own, "source": 10.0, "points": points, "seconds": 1.0}

    found = table("distil", {"recovery one": row("plain", 1000, 10.1), "recovery two": row("best", 11, 10.1)})
    plain, best = (line.split(" | ") for line in found.splitlines()[2:])
    assert plain[4:6] == ["90", "95"]
    assert best[4:6] == ["0", "0"]


def test_the_twin_fits_what_may_come_home(tmp_path: Path) -> None:
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "weights").write_bytes(bytes(range(256)) * 2**17)
    files = pack(tmp_path / "twin", tmp_path)
    assert len(files) == 3
    assert all(file.stat().st_size < 16 * 2**20 for file in files)
    assert unpack(tmp_path, tmp_path / "other").joinpath("weights").stat().st_size == 2**25


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kernel"], "torch sees no CUDA device here"),
        (["fold", "--toy"], "has no checkpoint; run the part train first"),
        (["summary"], "has no gpu-"),
        (["unpack"], "has no twin.tar.0"),
        (["cook"], "is not one of"),
        (["pretrained", "--toy"], "needs --source DIR, --text FILE and --data FILE"),
        (
            ["pretrained", "--toy", "--source", "/nope", "--text", "/nope", "--data", "/nope"],
            "--source /nope has no config.json",
        ),
        (
            ["pretrained", "--toy", "--source", "recipes/demo", "--text", "/nope", "--data", "/nope"],
            "--text /nope is not a file",
        ),
        (["fold", "--toy", "--text", "a.txt"], "are of the part pretrained alone"),
    ],
)
def test_bad_input(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "out"), "--work", str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_sizes_of_a_test_are_refused_as_results(tmp_path: Path) -> None:
    """Toy rows cannot be mixed with a real day's."""
    Ledger("fold", TOY.name, tmp_path, tmp_path, 1).write()
    with pytest.raises(InvalidInput, match="name another --work"):
        Ledger("fold", replace(FULL).name, tmp_path, tmp_path, 1)
