"""`kvfold migrate`: the smallest step that holds becomes the output, also after a kill."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvfold.convert.write.model_card import without_metadata, written_by_kvfold
from kvfold.core.errors import InvalidInput
from kvfold.distill.stages.state import newest
from kvfold.migration import steps
from kvfold.migration.request import read_bound

from ..support.distillation import as_launched
from ..support.migrations import DEMO, arguments, interrupt, invoke, unproven
from ..support.tiny import make
from ..support.tokenizers import save_tokenizer
from ..support.warm_python import warm_python


def ratios(report: dict[str, Any]) -> dict[str, float]:
    return {step["step"]: step["perplexity_ratio"]["mean"] for step in report["steps"]}


@pytest.fixture(scope="module")
def whole(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migration that nothing interrupts, and that keeps its steps."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_python())
        done = invoke([*arguments(texts, out), "--json", "--keep-steps"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads((out / "report.json").read_text())
    return out


def test_the_smallest_step_that_holds_is_the_output(whole: Path) -> None:
    from transformers import AutoModelForCausalLM

    report = json.loads((whole / "report.json").read_text())
    assert report["met"]
    assert (report["chosen"], [step["cache_ratio"] for step in report["steps"]]) == ("12.5%", [0.5, 0.125])
    assert report["identity"] == {"checked": True, "kl": 0.0, "max_logit_difference": 0.0}
    assert AutoModelForCausalLM.from_pretrained(whole).config.num_key_value_heads == 1
    assert "<svg" in (whole / "report.html").read_text()
    assert not whole.with_name("out.partial").exists()


def test_records_name_the_places_where_things_are(whole: Path) -> None:
    from kvfold.checkpoints.record import folded_parent

    kept = {str(path.relative_to(whole)) for path in whole.glob("steps/*/*")}
    assert kept == {"steps/folded/50%", "steps/folded/12.5%", "steps/distilled/50%"}
    assert folded_parent(whole) == whole.resolve() / "steps/folded/12.5%"
    assert folded_parent(whole / "steps/distilled/50%") == whole.resolve() / "steps/folded/50%"
    assert json.loads((whole / "eval.json").read_text())["checkpoint"]["path"] == str(whole.resolve())
    for name in ("kvfold.json", "eval.json", "README.md", "report.json", "report.html"):
        assert ".partial" not in (whole / name).read_text(), name
    step = whole / "steps/distilled/50%"
    assert (
        f"kvfold eval {step} --suite tasks --out {step}/eval-tasks.json"
        in (whole / "report.html").read_text()
    )


def test_the_card_names_the_command_of_the_search(whole: Path, texts: Path) -> None:
    options = f"--steps 50%,12.5% --text {texts / 'held.txt'} --train {texts / 'train.txt'} "
    options += "--tokens-per-step 2k --window 32 --max-windows 4 --sequences 2 --refine 1 "
    options += "--set evaluate=null --set stages.0.batch_tokens=512"
    command = json.loads((whole / "kvfold.json").read_text())["migrate"]["command"]
    assert command == f"kvfold migrate {DEMO} --to gqa --until 'ppl<9x' {options}"
    card = (whole / "README.md").read_text()
    assert "A search found this size:\n\n```console\n$ kvfold migrate demo --to gqa --until 'ppl<9x' " in card
    assert "--text held.txt --train train.txt --tokens-per-step 2k" in card
    assert "These commands make it without the search:\n\n```console\n$ kvfold convert demo --to gqa " in card
    assert written_by_kvfold(without_metadata(card))


def stopped(words: list[str], monkeypatch: pytest.MonkeyPatch, at: str, stop: Any) -> None:
    """Begin a migration, without its proof, that ends where `steps.<at>` is `stop`."""
    unproven(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(steps, at, stop)
        assert invoke(words).exit_code == 130


def test_an_unsound_fold_is_refused(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run leaves the fold behind; the second judges it, too, before it trains it."""
    unproven(monkeypatch)
    found = SimpleNamespace(failures=["cache: it is not smaller"])
    monkeypatch.setattr(steps, "verify", lambda *_, **__: found)
    monkeypatch.setattr(steps, "distill", lambda *_: pytest.fail("it was trained"))
    for _ in range(2):
        done = invoke(arguments(texts, tmp_path / "out"))
        assert "does not pass kvfold verify: cache: it is not smaller" in done.stderr


def test_a_killed_run_goes_on_to_the_same_bytes(
    texts: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output is printed as it was named, and recorded in full."""
    out = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    words = arguments(texts, Path("out"))
    stopped(words, monkeypatch, "distill", interrupt)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([warm_python(), "-m", "kvfold", *words], **streams) as started:
        while newest(tmp_path / "out.partial/distilled/50%.partial/state") is None and started.poll() is None:
            time.sleep(0.01)
        started.kill()
        started.communicate()
    assert started.returncode == -signal.SIGKILL
    assert not out.exists()
    other = invoke([*words, "--seed", "1"], code=2)
    assert "another command, which differs in calibration.seed (was 0)" in other.output
    done = invoke(words, code=0)
    assert "resuming after step" in done.stderr
    assert done.stdout.endswith("Wrote out (12.5%). Next: kvfold eval out --text ANOTHER_FILE\n")
    assert str(tmp_path) not in done.stdout
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert f"kvfold eval {out} --suite tasks --out {out}/eval-tasks" in (out / "report.html").read_text()


def test_what_is_done_is_not_done_again_and_the_bound_may_change(
    texts: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ratios(json.loads((whole / "report.json").read_text()))
    measure = steps.evaluate

    def stop_at_second(student: Path, *rest: Any, **more: Any) -> Any:
        if student.name == "12.5%":
            raise KeyboardInterrupt
        return measure(student, *rest, **more)

    out = tmp_path / "out"
    stopped(arguments(texts, out), monkeypatch, "evaluate", stop_at_second)
    for name in ("study", "rewrite", "distill"):
        monkeypatch.setattr(steps, name, None)
    between = sum(expected.values()) / 2
    done = invoke([*arguments(texts, out, f"ppl<{between:.6f}x"), "--json"], code=0)
    report = json.loads(done.stdout)
    assert ratios(report) == expected
    assert [step["met"] for step in report["steps"]] == [True, False]
    assert (report["chosen"], report["until"]) == ("50%", f"ppl<{between:.6f}x")
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 4


@pytest.mark.usefixtures("warm_probe")
def test_where_no_step_holds_the_first_has_a_name_that_tells(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = arguments(texts, Path("öut"), "ppl<0.5x", calibration="none", to="mla")
    del words[words.index("--refine") : words.index("--refine") + 2]
    done = invoke([*words, "--json"], code=3)
    assert "no step holds ppl<0.5x; the nearest one, 50%, is in öut.unmet; use" in done.stderr
    report = json.loads(done.stdout)
    assert (report["met"], report["chosen"], report["not_tried"]) == (False, "50%", ["12.5%"])
    assert report["identity"]["kl"] < 1e-6
    assert (tmp_path / "öut.unmet" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["öut.partial", "öut.unmet"]
    for name in ("kvfold.json", "eval.json", "report.json", "report.html", "README.md"):
        assert ".partial" not in (tmp_path / "öut.unmet" / name).read_text(), name
    shutil.rmtree("öut.partial")
    again = invoke(words, code=2)
    assert "öut.unmet exists without" in again.stderr
    assert "from which another bound could resume; move or remove it, or name another --out" in again.stderr


def plan_of(out: Path, texts: Path, *more: str) -> dict[str, Any]:
    """Return what --dry-run says of a migration of the demo to MLA, and the notes under `notes`."""
    words = ["migrate", str(DEMO), "--to", "mla", "--until", "kl<1", "--out", str(out)]
    words += ["--text", str(texts / "held.txt"), "--train", str(texts / "train.txt")]
    done = invoke([*words, *more, "--dry-run", "--json"], code=0)
    return {"notes": done.stderr, **json.loads(done.stdout)}


def test_dry_run_writes_nothing(texts: Path, tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "out", texts, "--text", "stdlib", "--train", "stdlib")
    assert [step["cache"]["ratio"] for step in plan["steps"]] == [0.5, 0.25, 0.125]
    assert plan["distillation"]["data"]["source"] == "stdlib"
    one = plan_of(tmp_path / "out", texts, "--steps", "25%")["folds"]["phases"]
    three = plan["folds"]["phases"]
    assert three["text"] < 2 * one["text"], "the source writes one text for all folds"
    assert three["refinement"] > 2 * one["refinement"]
    assert not list(tmp_path.iterdir())


def test_steps_that_a_source_cannot_take_are_left_out(texts: Path, tmp_path: Path) -> None:
    source = make(tmp_path / "source", num_key_value_heads=4, vocab_size=300)
    save_tokenizer(source)
    words = ["migrate", str(source), "--to", "gqa", "--until", "ppl<2x", "--out", str(tmp_path / "out")]
    words += ["--text", str(texts / "held.txt"), "--train", str(texts / "train.txt"), "--dry-run", "--json"]
    done = invoke(words)
    assert [step["step"] for step in json.loads(done.stdout)["steps"]] == ["50%", "25%"]
    assert "no step of 12.5%: a budget of" in done.stderr
    alone = make(tmp_path / "alone", num_key_value_heads=1)
    assert (
        "Error: a budget of"
        in invoke([word.replace(str(source), str(alone)) for word in words], code=2).stderr
    )


@pytest.mark.parametrize(("text", "path", "bound"), [
    ("ppl<1.02x", "suites.ppl.ratio.mean", 1.02),
    ("ppl <= 2x", "suites.ppl.ratio.mean", 2.0),
    ("ppl<15.5", "suites.ppl.student.perplexity", 15.5),
    ("kl<0.05", "suites.fidelity.kl.mean", 0.05),
    ("fidelity.kl.mean<0.05", "suites.fidelity.kl.mean", 0.05),
])  # fmt: skip
def test_bounds(text: str, path: str, bound: float) -> None:
    found = read_bound(text)
    assert (found.text, ".".join(found.path), found.bound) == (text, path, bound)


@pytest.mark.parametrize(("text", "sentence"), [
    ("kl.added<0.1", "names the suite storage, which is not run; bound what kvfold migrate measures"),
    ("cache.ratio<0.3", "names the suite cache, which is not run; bound what kvfold migrate measures"),
    ("cache<0.3", "names the suite cache, which is not run"),
    (" suites.cache.ratio < 0.3", "names the suite cache, which is not run"),
    ("cache.student.elements_per_token_per_layer < 9", "names the suite cache, which is not run"),
    ("schema<2", "does not limit the loss"),
    ("kl<0", "can never hold: fidelity.kl.mean is at least 0; give another bound"),
    ("kl.p99<=-0.1", "can never hold: fidelity.kl_percentiles.p99.mean is at least 0"),
    ("ppl<0.9", "can never hold: ppl.student.perplexity is at least 1"),
    ("top1>1", "can never hold: fidelity.same_top1.mean is at least 0 and at most 1"),
    ("top1==1.5", "can never hold: fidelity.same_top1.mean is at least 0 and at most 1"),
    ("ppl<0x", "can never hold: ppl.ratio.mean is at least 0"),
    ("ppl>1.02x", "did you mean 'ppl<1.02x'?"),
    ("kl>0.1",
     "does not hold for a fold that loses less, so no search can end at it; did you mean 'kl<0.1'?"),
    ("ppl >= 1.1x", "did you mean 'ppl <= 1.1x'?"),
    ("top1<0.9", "did you mean 'top1>0.9'?"),
    ("kl.max==2", "did you mean 'kl.max<=2'?"),
    ("delta_p_rms>0.1", "the report has no delta_p_rms"),
    ("fidelity.delta_p_rms.mean>0.1", "did you mean 'fidelity.delta_p_rms.mean<0.1'?"),
    ("ppl.teacher.perplexity>3", "does not limit the loss"),
    ("ppl<.5x", "is not a comparison with a number"),
    ("ppl<1.2.3x", "is not a comparison with a number"),
    ("", "is not a comparison with a number"),
    ("ppl", "is not a comparison with a number"),
    ("ppl<x", "is not a comparison with a number"),
    ("kl<0.1x", "is not a comparison with a number"),
    ("kl<nan", "is not a comparison with a number"),
    ("foo<1", "the report has no foo"),
    ("ppl.x<1", "suites.ppl has no x; it has"),
    ("kl<x", "is not a comparison with a number; write for example 'ppl<1.02x' or 'kl<0.05', of kl, kl.mean"),
])  # fmt: skip
def test_a_wrong_bound_says_what_is_wrong(text: str, sentence: str) -> None:
    with pytest.raises(InvalidInput) as mistake:
        read_bound(text)
    assert str(mistake.value).startswith(f"--until {text!r}")
    assert sentence in str(mistake.value)
    assert "kl.added" not in str(mistake.value).removeprefix(f"--until {text!r}")


@pytest.mark.parametrize(("changed", "sentence"), [
    ({"steps": "25%,50%"}, "--steps 25%,50%: 50% gives no smaller cache than 25% before it"),
    ({"steps": "30%,25%"}, "25% gives no smaller cache than 30% before it"),
    ({"steps": "150%"}, "--steps is '150%'; it should be a share of the source's cache"),
    ({"steps": "50%,"}, "--steps"),
    ({"steps": "5%"}, "--steps 5%: a budget of 12 elements"),
    ({"to": "mqa"}, "does not apply to --to mqa"),
    ({"tokens-per-step": "many"}, "--tokens-per-step is 'many'; it should be a number of tokens"),
    ({"tokens-per-step": "0"}, "--tokens-per-step is '0'; it should be"),
    ({"window": "4096"}, "--window 4096 exceeds the 256 positions"),
    ({"text": "missing.txt"}, "missing.txt is not a file"),
    ({"train": "missing.txt"}, "missing.txt"),
    ({"set": "output=elsewhere"}, "every step has its own student and output"),
    ({"set": "stages.0.rate=1"}, "unknown key 'rate'"),
    ({"calibration": "none"}, "--refine 1 needs text to refine on"),
    ({"out": str(DEMO / "inside")}, "is inside the source"),
    ({"set": "evaluate.source=nofile.txt"}, "evaluate.source nofile.txt is not a file"),
    ({"set": "evaluate.seq_len=99999"}, "evaluate.seq_len 99999 exceeds the 256 positions"),
])  # fmt: skip
def test_mistakes(texts: Path, tmp_path: Path, changed: dict[str, str], sentence: str) -> None:
    done = invoke(arguments(texts, **{"out": tmp_path / "out", **changed}))  # type: ignore[arg-type]
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_place_where_nothing_can_be_made_is_refused_at_once(texts: Path) -> None:
    for words in (arguments(texts, Path("/proc/x")), [*arguments(texts, Path("/proc/x")), "--dry-run"]):
        assert "Error: cannot write /proc/x: nothing can be made in /proc" in invoke(words, code=2).stderr


def test_text_trained_on_is_refused(texts: Path, tmp_path: Path) -> None:
    """The options are named that the user gave, not the keys of the recipe that they become."""
    held = texts / "held.txt"
    done = invoke(arguments(texts, tmp_path / "out", train=str(held)), code=2)
    assert f"Error: --text {held} is trained on: it is {held} of --train {held}; name a text" in done.stderr
    lost = invoke(arguments(texts, tmp_path / "out", train="missing.txt"))
    assert "Error: --train missing.txt is neither a file" in lost.stderr


def test_text_with_what_it_learns_is_refused(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words are searched for in the beginning of the training text at once, and in all of it by the run."""
    unproven(monkeypatch)
    train = tmp_path / "train.txt"
    train.write_text((texts / "train.txt").read_text() + "\n" + (texts / "held.txt").read_text())
    words = arguments(texts, tmp_path / "out", train=str(train), set="evaluate.every=1")
    words[words.index("--tokens-per-step") + 1] = "30k"
    done = invoke(words, code=2)
    assert f"Error: --text {texts / 'held.txt'} is trained on: " in done.stderr
    assert "Step 1" not in done.stderr


@pytest.mark.parametrize("window", [256, 32])
def test_a_distillation_has_a_hundred_steps(texts: Path, tmp_path: Path, window: int) -> None:
    plan = plan_of(tmp_path / "out", texts, "--train", "stdlib", "--window", str(window))
    (stage,) = plan["distillation"]["stages"]
    steps = stage["tokens"] / stage["batch_tokens"]
    assert (100 <= steps < 200, plan["notes"]) == (True, "")


def test_a_distillation_of_few_steps_is_told_before_it_begins(texts: Path, tmp_path: Path) -> None:
    told = plan_of(tmp_path / "out", texts, "--window", "256", "--tokens-per-step", "10k")["notes"]
    assert "Note: --tokens-per-step 10k: stage kl has 40 optimizer steps of 256 tokens, which recover" in told


def test_a_migration_with_the_batches_of_an_earlier_version_is_resumed(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence that refuses the command names the earlier values."""
    unproven(monkeypatch)
    monkeypatch.setattr(steps, "_carry_out", interrupt)
    words = arguments(texts, tmp_path / "out", set="data.seed=0")[:-2]
    before = [
        "--set",
        "stages.0.lr=0.0005",
        "--set",
        "stages.0.batch_tokens=512",
        "--set",
        "evaluate.every=1",
    ]
    assert invoke([*words, *before]).exit_code == 130
    refused = invoke(words, code=2)
    values = ("recipe.evaluate.every (was 1)", "recipe.stages[0].lr (was 0.0005)")
    assert all(value in refused.stderr for value in values), refused.stderr
    assert invoke([*words, *before]).exit_code == 130, "it is begun again"


def test_several_processes_are_refused(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_launched(monkeypatch)
    done = invoke(arguments(texts, tmp_path / "out"))
    assert (done.exit_code, "runs in one process" in done.stderr) == (2, True)
