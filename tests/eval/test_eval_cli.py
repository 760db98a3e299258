"""`kvfold eval` as its user meets it: the table, the JSON, and one sentence for each mistake."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import Result

from kvfold.checkpoints.record import describe, write_record
from kvfold.eval.suites import harness
from kvfold.texts.corpus import Text

from .conftest import Make, run


@pytest.fixture(scope="session")
def distilled(make: Make, mha: Path, other: Path) -> Path:
    """A checkpoint whose record says: distilled from `other`, which was folded from `mha`."""
    directory = make(seed=2)
    parents = [{"stage": "convert", "path": str(other)}]
    write_record(
        directory, {"schema": 1, "stage": "distill", "source": describe(mha, None), "parents": parents}
    )
    return directory


def test_json_is_one_object_with_everything_in_it(
    distilled: Path, mha: Path, other: Path, file: Path, text: Text
) -> None:
    result = run(distilled, "--text", file, "--window", "32", "--device", "cpu", "--json", code=0)
    report = json.loads(result.stdout)
    assert report["protocol"] == {
        "name": "text:letters.txt window=32 bos=each", "text_sha256": text.sha256, "window": 32,
        "windows": 19, "bos": "each", "scored_tokens": 19 * 31, "scored_bytes": 19 * 31,
    }  # fmt: skip
    assert [report[role]["path"] for role in ("checkpoint", "teacher", "parent")] == [
        str(distilled),
        str(mha),
        str(other),
    ]
    assert list(report["suites"]) == ["ppl", "fidelity", "cache"]
    perplexity = report["suites"]["ppl"]
    assert len(perplexity["student"]["window_nll"]) == 19
    worse = perplexity["student"]["nll"]["mean"] - perplexity["teacher"]["nll"]["mean"]
    assert perplexity["difference"]["mean"] == pytest.approx(worse)
    assert set(perplexity["recovered_share"]) == {"value", "reason"}
    assert report["suites"]["fidelity"]["kl"]["mean"] > 0
    assert report["suites"]["cache"]["student"]["elements_per_token_per_layer"] == 64


def test_the_table_names_the_protocol_and_every_measure(mha: Path, other: Path, file: Path) -> None:
    result = run(mha, "--teacher", other, "--text", file, "--window", "32", "--device", "cpu", code=0)
    for words in (
        "letters.txt",
        "window=32",
        "bos=each",
        "perplexity",
        "KL(teacher || student)",
        "same top-1",
        "undefined",
    ):
        assert words in result.stdout


def test_a_checkpoint_without_a_record_is_measured_alone_and_says_so(mha: Path) -> None:
    result = run(mha, "--text", "stdlib", "--max-windows", "2", "--device", "cpu", "--json", code=0)
    assert json.loads(result.stdout)["protocol"]["name"] == "stdlib window=64 bos=each max-windows=2"
    assert json.loads(result.stdout)["teacher"] is None
    assert "--teacher" in result.stderr


def test_without_the_harness_a_sentence_names_it(mha: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    result = run(mha, "--suite", "tasks", "--tasks", "any", "--device", "cpu", code=2)
    assert "which is not installed; run: pip install 'kvfold[eval]'" in result.stderr
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))  # one whose own needs are missing
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    result = run(mha, "--suite", "tasks", "--tasks", "any", "--device", "cpu", code=2)
    assert "cannot be imported here (import of lm_eval.tasks halted" in result.stderr


def test_out_holds_the_json_and_is_never_overwritten(mha: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "eval.json"
    arguments = (mha, "--text", file, "--device", "cpu", "--json", "--out", out)
    assert json.loads(run(*arguments).stdout) == json.loads(out.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["eval.json"]
    again = run(*arguments)
    assert (again.exit_code, again.stdout) == (2, "")
    assert f"Error: --out {out} exists; name another file" in again.stderr


def test_an_out_that_cannot_be_written_is_told_before_the_scoring(
    mha: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*arguments: object, **options: object) -> None:
        pytest.fail("scored first")

    monkeypatch.setattr("kvfold.eval.run.evaluate", evaluate)
    (tmp_path / "link.json").symlink_to("nowhere")
    (tmp_path / "own.json.partial").write_text("mine")
    (tmp_path / "dir.json.partial").mkdir()
    for out, sentence in (
        ("x" * 250 + ".json", "cannot be written: File name too long; name another file, or"),
        ("link.json", "exists; name another file"),
        ("own.json", "own.json.partial exists and is not unfinished work of this user's kvfold"),
        ("dir.json", "dir.json.partial exists and is not unfinished work of this user's kvfold"),
        *([("/proc/x.json", "cannot write /proc/x.json.partial: ")] if Path("/proc").is_dir() else []),
    ):
        check_mistake(run(mha, "--text", file, "--out", tmp_path / out), sentence)
    assert (tmp_path / "own.json.partial").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_mistake_leaves_nothing_where_out_was_to_be(mha: Path, file: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.json.partial").mkdir(mode=0o700)  # as an evaluation that was killed leaves it
    check_mistake(
        run(mha, "--text", file, "--window", "65", "--out", tmp_path / "eval.json"), "--window 65 exceeds"
    )
    assert not list(tmp_path.iterdir())


def test_suites_that_read_no_text_need_none(mha: Path) -> None:
    result = run(mha, "--suite", "cache", "--memory", "1GB", "--device", "cpu", "--json", code=0)
    report = json.loads(result.stdout)
    assert (report["protocol"], list(report["suites"])) == (None, ["cache"])
    assert report["suites"]["cache"]["student"]["contexts"][0]["largest_batch"] > 0
    shown = run(mha, "--suite", " cache, ", "--memory", "1GB", "--device", "cpu").stdout
    assert mha.name in shown
    assert "sequences in 1 GB" in shown


def test_failed_assertions_exit_3_after_it(mha: Path, other: Path, file: Path, tmp_path: Path) -> None:
    arguments = (mha, "--teacher", other, "--text", file, "--window", "32", "--device", "cpu", "--json")
    assert run(*arguments, "--assert", "kl.mean>0", "--assert", "suites.cache.ratio == 1").exit_code == 0
    out = tmp_path / "eval.json"
    unmet = run(*arguments, "--assert", "kl.mean>0", "--assert", "top1 >= 1", "--out", out, code=3)
    assert json.loads(unmet.stdout) == json.loads(out.read_text())
    assert "does not hold: top1 >= 1 (it is 0." in unmet.stderr
    early = run(*arguments, "--assert", "kl.men<1")
    assert (early.exit_code, early.stdout) == (2, "")
    assert "'kl.men<1': the report has no kl; did you mean 'kl.mean'?" in early.stderr
    late = run(*arguments, "--assert", "fidelity.kl.men<1")
    assert (late.exit_code, late.stdout) == (2, "")
    assert "suites.fidelity.kl has no men" in late.stderr


@pytest.mark.parametrize(("options", "sentence"), [
    (["--window", "65"], "--window 65 exceeds the 64 positions of"),
    (["--window", "1"], "Invalid value for '--window'"),
    (["--window", "-4"], "Invalid value for '--window'"),
    (["--max-windows", "0"], "Invalid value for '--max-windows'"),
    (["--max-windows", "-1"], "Invalid value for '--max-windows'"),
    (["--batch-size", "0"], "Invalid value for '--batch-size'"),
    (["--dtype", "float8"], "'float8' is not one of 'auto', 'float32', 'bfloat16'"),
    (["--teacher", "./absent"], "./absent is not a directory"),
    (["--out", "/absent/eval.json"], "there is no directory /absent"),
    (["--suite", "pl"], "--suite is 'pl'; pl is not a suite; known are ppl, fidelity, storage"),
    (["--suite", ","], "--suite is ','; it names nothing; known are ppl"),
    (["--suite", "ppl", "--memory", "1GB"],
     "--memory belongs to the suite cache, which --suite does not name"),
    (["--memory", "much"], "--memory is 'much'; it should be a size, for example 500MB or 5GB"),
    (["--suite", "ppl", "--assert", "kl.mean<1"],
     "names the suite fidelity, which is not run; add it to --suite"),
    (["--assert", "kl.mean"], "--assert 'kl.mean' is not a comparison with a number"),
    (["--assert", "kl.mean<low"], "--assert 'kl.mean<low' is not a comparison with a number"),
    (["--offload-dir", "x"], "--offload-dir has no effect without --device-map auto; add that option"),
    (["--cpu-memory", "1GB"], "--cpu-memory has no effect without --device-map auto; add that option"),
    (["--text", "wikitext2-gptq-65", "--rows", "/absent.json"],
     "--rows /absent.json cannot be read: No such file"),
    (["--rows", "/absent.json"], "--rows is for WikiText-2, not for --text"),
    (["--text", "/absent.txt"],
     "/absent.txt is not a file; --text takes a file of text or of documents, or the word stdlib"),
])  # fmt: skip
def test_wrong_options_are_one_sentence(mha: Path, file: Path, options: list[str], sentence: str) -> None:
    check_mistake(run(mha, "--text", file, "--device", "cpu", *options), sentence)


@pytest.mark.parametrize(("content", "sentence"), [
    (b"", "holds no text"),
    (b" \n ", "holds no text"),
    (b"\xff\xfe", "is not UTF-8 text"),
    (b"short", "text:given.txt has 5 tokens, but a window of 64 takes 63 of them; --window 6 would fit"),
])  # fmt: skip
def test_an_unusable_text_is_one_sentence(mha: Path, tmp_path: Path, content: bytes, sentence: str) -> None:
    given = tmp_path / "given.txt"
    given.write_bytes(content)
    check_mistake(run(mha, "--text", given, "--device", "cpu"), sentence)


def test_an_unusable_model_is_one_sentence(mha: Path, make: Make, file: Path, tmp_path: Path) -> None:
    check_mistake(run("./absent", "--text", file), "./absent is not a directory")
    check_mistake(run(tmp_path, "--text", file), "has no config.json")
    check_mistake(
        run(mha, "--text", file, "--teacher", make(last="fin"), "--device", "cpu"),
        "have different tokenizers",
    )
    orphan = tmp_path / "orphan"
    shutil.copytree(mha, orphan)
    gone = describe(mha, None) | {"path": str(tmp_path / "gone")}
    write_record(orphan, {"schema": 1, "stage": "convert", "source": gone, "parents": []})
    check_mistake(run(orphan, "--text", file), "--teacher")
    assert run(orphan, "--text", file, "--teacher", mha, "--device", "cpu").exit_code == 0


def test_suites_that_read_a_text_ask_for_it(mha: Path) -> None:
    check_mistake(
        run(mha), "Error: the suites ppl, fidelity read a text; choose one with --text, for example stdlib"
    )
    check_mistake(run("./absent"), "./absent is not a directory")
    check_mistake(run("absent"), "absent is not a directory here; if it is a Hub id, the suites ppl,")


def test_an_assertion_that_nothing_can_meet_is_refused_before_the_run(
    mha: Path, distilled: Path, other: Path, file: Path, tmp_path: Path
) -> None:
    def asserting(model: Path, expression: str) -> Result:
        return run(model, "--text", file, "--device", "cpu", "--window", "32", "--assert", expression)

    check_mistake(asserting(mha, "recovered>0.5"), "was not distilled from a fold, so nothing was recovered")
    check_mistake(asserting(mha, "kl<1"), "has no teacher; choose one with --teacher")
    assert asserting(distilled, "recovered>-1e9").exit_code in (0, 3)
    orphan = tmp_path / "orphan"
    shutil.copytree(distilled, orphan)
    gone = [{"stage": "convert", "path": str(tmp_path / "gone")}]
    write_record(orphan, {"schema": 1, "stage": "distill", "source": describe(mha, None), "parents": gone})
    check_mistake(asserting(orphan, "recovered>0.5"), "is not where its kvfold.json says; put it back")
    found = run(orphan, "--text", file, "--device", "cpu", "--window", "32", "--suite", "ppl", "--json")
    reason = json.loads(found.stdout)["suites"]["ppl"]["recovered_share"]["reason"]
    assert reason == "the fold is not where kvfold.json says"


def check_mistake(result: Result, sentence: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert sentence in result.stderr.splitlines()[-1]


def test_a_full_gpu_is_told(mha: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("kvfold.eval.scores.last_hidden", full)
    result = run(mha, "--text", file, "--window", "32", "--suite", "ppl", code=2)
    assert "Error: the GPU has too little memory (2.00 GiB more were needed); use a smaller" in result.output
    assert "--batch-size" in result.output
    assert "--one-at-a-time" not in result.output, "there is one model"
    result = run(mha, "--text", file, "--window", "32", "--suite", "ppl", "--batch-size", "1")
    assert "use a smaller --window or --dtype bfloat16" in result.output


@pytest.mark.parametrize(("suite", "remedy"), [
    ("retrieval", "smaller --retrieval-lengths or --dtype bfloat16"),
    ("ruler", "smaller --ruler-lengths or --dtype bfloat16"),
    ("tasks", "--dtype bfloat16"),
])  # fmt: skip
def test_a_full_memory_names_what_helps_a_suite_with_its_own_prompts(
    suite: str, remedy: str, mha: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for name, stand_in in (("check", lambda _: None), ("check_room", lambda _: None), ("measure", full)):
        monkeypatch.setattr(f"kvfold.eval.suites.{suite}.{name}", stand_in, raising=False)
    result = run(mha, "--suite", suite, "--batch-size", "1", code=2)
    assert result.stderr.endswith(f"the GPU has too little memory; use {remedy}\n")
