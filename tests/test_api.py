"""The Python API: what `import kvfold` offers, its results, its mistakes, and that it prints nothing."""

import doctest
import hashlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold import api
from kvfold.checkpoints.record import read_record
from kvfold.models.causal_lm import load
from kvfold.models.code_files import foreign_code
from kvfold.models.load_options import LoadOptions
from kvfold.results import Folded

DEMO = Path(__file__).parent.parent / "recipes" / "demo"
FUNCTIONS = ("fold", "plan", "train", "evaluate", "verify", "quantize", "publish", "report")
SHORT: dict[str, Any] = {"sequences": 4, "length": 64, "refine": 0}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def folded(work: Path) -> Folded:
    return kvfold.fold(DEMO, kvfold.MLA(kv_budget="25%"), out=work / "mla", **SHORT)


def test_examples_run(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every docstring's example, in order, since later ones read what earlier ones wrote."""
    for name in FUNCTIONS:
        found = doctest.DocTestFinder(recurse=False).find(getattr(api, name), name, globs={})
        assert sum(len(test.examples) for test in found) >= 2, name
        for test in found:
            test.globs = {"demo": DEMO, "work": work}
            outcome = doctest.DocTestRunner().run(test)
            assert outcome.failed == 0, name
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_importing_is_light() -> None:
    """Neither torch nor pydantic is loaded, nor anything else that takes long."""
    code = (
        "import sys, kvfold\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'rich', 'click', 'huggingface_hub', 'yaml'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
        "assert issubclass(kvfold.InvalidInput, ValueError)\n"
        "print(repr(kvfold.MLA(kv_budget='25%')), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    light, target = done.stdout.splitlines()
    assert light == "[]"
    assert target.startswith("MLA(rank=None, kv_budget='25%'")
    assert target.endswith("False")


def test_the_public_names() -> None:
    assert set(kvfold.__all__) == {
        *FUNCTIONS, "absorb", "assemble", "migrate", "GQA", "MQA", "MLA", "InvalidInput",
    }  # fmt: skip
    assert set(kvfold.__all__) <= set(dir(kvfold))
    for name in kvfold.__all__:
        assert getattr(kvfold, name).__name__ == name
        assert getattr(kvfold, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = kvfold.nothing  # type: ignore[attr-defined] # that there is none is what is tested
    assert files(kvfold).joinpath("py.typed").is_file()


def test_a_name_of_a_command_says_which_function_it_is() -> None:
    """In a process that has imported none of the modules of these names."""
    code = (
        "import kvfold\n"
        "for name in ('convert', 'distill', 'eval', 'lab'):\n"
        "    try:\n"
        "        getattr(kvfold, name)\n"
        "    except AttributeError as error:\n"
        "        print(error)\n"
        "from kvfold import convert, distill, eval\n"
        "print(convert.__name__, distill.__name__, eval.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    begin = "module 'kvfold' has no attribute"
    assert done.stdout.splitlines() == [
        f"{begin} 'convert'; the function is kvfold.fold",
        f"{begin} 'distill'; the function is kvfold.train",
        f"{begin} 'eval'; the function is kvfold.evaluate",
        f"{begin} 'lab'; it is a command only: kvfold lab --help",
        "kvfold.convert kvfold.distill kvfold.eval",
    ]


def test_a_fold_and_its_result(folded: Folded, work: Path) -> None:
    record = read_record(work / "mla")
    assert json.loads(json.dumps(folded.record)) == record
    assert folded.directory == work / "mla"
    assert folded.cache["ratio"] == 0.25
    assert folded.predicted_loss is not None
    assert 0 < folded.predicted_loss < 1
    assert folded.request.calibration == "self"
    assert any("load the output in transformers" in text for text in folded.notices)
    assert folded.verification.failures == []
    for shown in (str(folded), repr(folded), folded._repr_html_()):
        assert "25.0%" in shown
        assert "nats per token" in shown
    assert folded._repr_html_().startswith("<table>")
    with pytest.raises(kvfold.InvalidInput, match=r"^device is 'gpu'; .* one of auto, cpu, cuda, or cuda:N$"):
        folded.load(device="gpu")
    with pytest.raises(kvfold.InvalidInput, match=r"^dtype is 'bf16'; it should be one of auto, float32"):
        folded.load(dtype="bf16")
    assert folded.load(dtype=torch.float32, device=torch.device("cpu")).dtype == torch.float32
    model = folded.load(dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert model(torch.arange(8)[None]).logits.isfinite().all()


def test_the_table_of_a_plan() -> None:
    table = kvfold.plan(DEMO, context="1k", batch=2, memory="1GB", budgets=("50%",))
    assert table.chosen["command"].startswith("kvfold convert ")
    assert len(table) == len(list(table)) == len(table.rows)
    assert all(row["label"] in table._repr_html_() for row in table)
    assert [table[0], table[-1]] == [table.rows[0], table.rows[-1]]
    assert repr(table) == str(table)
    assert "(the source)" in str(table)
    for same in ("50%", [0.5], 0.5):
        again = kvfold.plan(DEMO, context="1k", batch=2, memory="1GB", budgets=same)
        assert [row["label"] for row in again] == [row["label"] for row in table]
    few = kvfold.plan(DEMO, context=256, batch=16, memory="8MB", budgets=("50%",))
    assert 0 < len(few) == len(few.rows) < len(few.report["candidates"]) == len(table)
    assert all(row["fits"] for row in few)
    assert len(few.grid(every=True).rows) - len(few.grid().rows) == len(table) - len(few)
    nothing = kvfold.plan(DEMO, context=1024, memory="1MB")
    assert nothing.chosen is None
    assert not list(nothing)
    assert nothing.advice.startswith("Nothing fits. What would: --memory ")


def test_measurements_have_paths(folded: Folded) -> None:
    found = kvfold.evaluate(
        folded.directory, text="stdlib", suites=["fidelity", "cache"], window=64, max_windows=2, memory="1GB"
    )
    assert found["kl"] == found["kl.mean"] == found["suites.fidelity.kl.mean"]
    assert found["kl.mean"] == found.report["suites"]["fidelity"]["kl"]["mean"]
    assert "KL" in str(found)
    assert "<table>" in found._repr_html_()
    with pytest.raises(kvfold.InvalidInput, match="suites has no ppl"):
        _ = found["ppl"]
    with pytest.raises(kvfold.InvalidInput, match=r"suites.fidelity.kl is not a number"):
        _ = found["fidelity.kl"]
    with pytest.raises(KeyError, match=r"^'kl.men': the report has no kl; did you mean 'kl.mean'"):
        _ = found["kl.men"]
    numbers = dict(found)
    assert list(numbers) == list(found) == list(found.keys())
    assert {"kl.mean", "top1", "cache.ratio"} <= numbers.keys()
    assert numbers["cache.ratio"] == found.get("cache.ratio") == found["cache.ratio"]
    assert "cache.student.elements_per_token_per_layer" in found
    assert "ppl" not in found
    assert found.get("ppl") is None
    assert 0 not in found
    with pytest.raises(KeyError, match=r"^0 is not the path of a number; give a text such as 'kl.mean'$"):
        _ = found[0]  # type: ignore[index]


def test_a_model_in_memory() -> None:
    """A transformers model comes back: the same as from its directory, and the source as it was."""
    source = AutoModelForCausalLM.from_pretrained(DEMO)
    before = {name: weight.clone() for name, weight in source.state_dict().items()}
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    heads = source.config.num_key_value_heads
    same = kvfold.fold(source, kvfold.GQA(kv_heads=heads), tokenizer=tokenizer)
    few = kvfold.fold(source, kvfold.GQA(kv_heads=2), tokenizer=tokenizer, calibration="none")
    assert few.config.num_key_value_heads == 2
    assert few.dtype == same.dtype == source.dtype
    ids_1T = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(same(ids_1T).logits, source.eval()(ids_1T).logits)
        assert not torch.equal(few(ids_1T).logits, source(ids_1T).logits)
    assert source.config.num_key_value_heads == heads
    assert all(torch.equal(weight, before[name]) for name, weight in source.state_dict().items())


def test_a_model_in_memory_is_saved_with_its_code(tmp_path: Path) -> None:
    """`save_pretrained` of one with kvfold's own class writes what transformers and kvfold load."""
    source, tokenizer = AutoModelForCausalLM.from_pretrained(DEMO), AutoTokenizer.from_pretrained(DEMO)
    target = kvfold.MLA(kv_budget="50%", rope="intact")
    folded = kvfold.fold(source, target, tokenizer=tokenizer, calibration="none")
    for part in (folded, tokenizer):
        part.save_pretrained(tmp_path)
    assert foreign_code(tmp_path) == ""
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    ours = load(tmp_path, LoadOptions(device="cpu", dtype="bfloat16")).model
    ids_1T = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(theirs(ids_1T).logits, folded(ids_1T).logits)
        assert torch.equal(ours(ids_1T).logits, folded(ids_1T).logits)


def test_progress_and_notices(
    work: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A callback hears every item of every stretch; the log has the notices; the terminal has nothing."""
    heard: list[tuple[str, int, int]] = []

    def listen(description: str, done: int, total: int) -> None:
        heard.append((description, done, total))

    with caplog.at_level(logging.WARNING, "kvfold"):
        found = kvfold.fold(DEMO, kvfold.MLA(kv_budget="50%"), out=work / "heard", progress=listen, **SHORT)
    for name in ("calibration text", "statistics", "fold"):
        counts = [(done, total) for description, done, total in heard if description == name]
        assert counts == [(n, counts[0][1]) for n in range(1, counts[0][1] + 1)], name
    assert heard[-1] == ("fold", 6, 6), "layers, not tensors that are copied"
    assert list(found.notices) == [record.message for record in caplog.records]
    assert found.notices
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def without_teacher(work: Path) -> dict[str, Any]:
    """Return a recipe whose student was not folded by kvfold, and that names no teacher."""
    stage = {"name": "kl", "tokens": 64, "batch_tokens": 64, "micro_batch": 2, "lr": 1e-4}
    data = {"source": "stdlib", "seq_len": 32}
    return {"schema": 1, "student": DEMO, "output": work / "none", "data": data, "stages": [stage]}


def mistakes(work: Path) -> Iterator[tuple[Any, str]]:
    """Yield calls that cannot be done, and a part of what they say."""
    mla, gqa = kvfold.MLA(kv_budget="25%"), kvfold.GQA(kv_heads=2)
    anything: Any = kvfold.fold
    yield lambda: kvfold.fold(work / "gone", mla), "is not a directory"
    yield lambda: kvfold.fold(DEMO, kvfold.GQA()), "target gqa takes either kv_heads N or kv_budget SHARE"
    yield lambda: kvfold.fold(DEMO, kvfold.GQA(kv_heads=3), calibration="none"), "do not fold into 3"
    yield lambda: kvfold.fold(DEMO, kvfold.MLA(kv_budget="250%")), "is not a share of the source's cache"
    yield lambda: kvfold.fold(DEMO, gqa, out=""), "out is ''; it should be a path, neither empty nor with"
    yield lambda: anything(DEMO, "mla"), "the target is 'mla'; it should be kvfold.GQA"
    yield lambda: anything(DEMO, mla, rnak=3), "unknown name 'rnak'; did you mean 'rank'?"
    yield lambda: anything(DEMO, mla, sequences="many"), "sequences is 'many'"
    yield lambda: kvfold.fold(DEMO, kvfold.GQA(kv_heads=True)), "kv_heads is True; it should be a whole"
    yield lambda: kvfold.plan(DEMO, batch=True), "batch is True; it should be a whole number"
    yield lambda: kvfold.evaluate(DEMO, text="stdlib", window=True), "window is True; it should be a whole"
    yield lambda: kvfold.fold(DEMO, gqa, engines=["vlm"]), "engines is 'vlm'; it should be 'transformers', "
    yield lambda: kvfold.fold(DEMO, gqa, out=DEMO), "exists and nothing is overwritten"
    yield lambda: anything(DEMO, gqa, tokenizer=1), "tokenizer is for a loaded model"
    yield lambda: anything(3, gqa), "the source is of type int"
    yield lambda: anything(None, mla, out="x"), "the source is of type NoneType; it should be a directory"
    model = SimpleNamespace(save_pretrained=None)
    yield lambda: anything(model, gqa, out="x"), "out is 'x'; leave it out, since a loaded model has no"
    yield lambda: kvfold.plan(DEMO, context="many"), "context is 'many'; it should be a number of tokens"
    yield lambda: kvfold.plan(DEMO, memory="24 apples"), "memory is '24 apples'; it should be a size"
    yield lambda: kvfold.plan(DEMO, context=0), "context is 0"
    yield lambda: kvfold.plan(DEMO, budgets=[2.5]), "budgets 2.5 is not a share of the source's cache"
    yield lambda: kvfold.plan(DEMO, budgets=5), "budgets is 5; it should be a list"
    yield lambda: kvfold.plan(DEMO, gaol="speed"), "unknown name 'gaol'; did you mean 'goal'?"
    yield lambda: kvfold.train(work / "none.yaml"), "cannot be read"
    yield lambda: kvfold.train({"schema": 1}), "recipe: "
    yield lambda: kvfold.train(3), "the recipe is of type int"  # type: ignore[arg-type] # a mistake on purpose
    yield lambda: kvfold.evaluate(DEMO), "choose one with text, for example stdlib"
    yield lambda: kvfold.evaluate(DEMO, text="stdlib", suites=["pplx"]), "suites is ['pplx']; pplx is not a"
    yield lambda: kvfold.evaluate(DEMO, text="stdlib", windw=3), "unknown name 'windw'; did you mean"
    yield lambda: kvfold.evaluate(DEMO, text="stdlib", memory="x"), "memory is 'x'; it should be a size"
    yield lambda: kvfold.evaluate(DEMO, text="stdlib", rows=work), "rows is for WikiText-2, not for text"
    yield lambda: kvfold.evaluate(DEMO, text="wikitext2-gptq-20", rows=3), "rows is 3; it should be a path"
    yield lambda: kvfold.evaluate(DEMO, suite="cache"), "unknown name 'suite'; did you mean 'suites'?"
    yield lambda: kvfold.verify(work / "gone"), "is not a directory"
    yield lambda: kvfold.verify(DEMO, engines=["vlm"]), "engines is 'vlm'; it should be 'transformers'"
    yield lambda: kvfold.verify(DEMO, engines=[]), "it should name an engine: transformers, vllm"
    yield lambda: kvfold.publish(work / "gone", "me/x", dry_run=True), "is not a directory"
    yield lambda: kvfold.publish(DEMO, "me/x", dry_run=True), "has no kvfold.json"
    yield lambda: kvfold.publish(DEMO, "me/x", verify="much", dry_run=True), "verify is 'much'"
    yield lambda: kvfold.assemble(work / "gone", DEMO), "is not a directory; name that of the folded text"
    yield lambda: kvfold.assemble(3, DEMO), "tower is 3; it should be"  # type: ignore[arg-type] # a mistake
    yield lambda: kvfold.report([work / "gone"], work / "gone.html"), "gone"


def wrong_values(work: Path) -> Iterator[tuple[Any, str]]:
    """Yield calls with values of kinds that an argument does not take, and a part of what they say."""
    functions: Any = kvfold
    yield lambda: kvfold.evaluate(DEMO, text="stdlib", offload_dir=work), "offload_dir has no effect without"
    yield lambda: kvfold.fold("x" * 5000, kvfold.MQA()), f"'{'x' * 75} ...: File name too long"
    places = {"device_map": "auto", "offload_dir": work / "weights"}
    yield (
        lambda: kvfold.evaluate(DEMO, text="stdlib", cpu_memory="much", **places),
        "cpu_memory is 'much'; it should be a size",
    )
    yield lambda: kvfold.evaluate(DEMO, text="stdlib", cpu_memory=0, **places), "cpu_memory is 0; it should"
    yield lambda: kvfold.assemble(DEMO, DEMO, shard_size=0), "shard_size is 0; it should be greater than or"
    yield lambda: kvfold.assemble(DEMO, DEMO, shard_size="many"), "shard_size is 'many'; it should be a size"
    model = SimpleNamespace(save_pretrained=None)
    mla, gqa = kvfold.MLA(rank=32), kvfold.GQA(kv_heads=2)
    yield lambda: functions.fold(DEMO, mla, rank=3), "rank is given twice, in the target and as an option"
    yield lambda: functions.fold(DEMO, kvfold.MLA(rank="")), "rank is ''; it should be a whole number or"
    yield lambda: functions.fold(DEMO, gqa, calibration=""), "calibration is ''; it should not be empty"
    yield lambda: functions.fold(model, gqa, tokenizer="x"), "tokenizer is 'x'; it should be a loaded"
    yield lambda: functions.evaluate(DEMO, text="stdlib", cache_dtype="int3"), "cache_dtype is 'int3'; it"
    yield lambda: functions.evaluate(DEMO, text="stdlib", device=3), "device is 3; it should be 'auto'"
    yield lambda: functions.evaluate(DEMO, text="stdlib", bos="each"), "bos is 'each'; it should be true"
    yield lambda: functions.evaluate(DEMO, suites=()), "suites is (); it names nothing; known are ppl, "
    yield lambda: functions.verify(DEMO, run=False, cache_dtype=["x"]), "cache_dtype is ['x']; it should be"
    yield lambda: functions.publish(DEMO, "me/x", verify=["lint"]), "verify is ['lint']; it should be"
    yield lambda: functions.train(""), "recipe is empty; name a file"
    yield lambda: functions.train(without_teacher(work)), "name the teacher with the key teacher=DIR"
    recipe = {"schema": 1, "student": str(DEMO), "output": str(work / "none"), "stages": [{"tokens": 64}]}
    yield lambda: functions.train({**recipe, "data": {"source": "", "seq_len": 32}}), "recipe: data.source is"


def wrong_names() -> Iterator[tuple[Any, str]]:
    """Yield calls whose arguments have other names or no name, and what they say."""
    functions: Any = kvfold
    yield lambda: functions.verify(DEMO, enginess=["vllm"]), "unknown name 'enginess'; did you mean"
    yield lambda: functions.train({}, foo=1), "unknown name 'foo'; known: recipe, settings, progress"
    yield lambda: functions.assemble(DEMO, DEMO, outt="x"), "unknown name 'outt'; did you mean 'out'?"
    mla = kvfold.MLA(rank=32)
    yield lambda: functions.fold(DEMO, mla, model="x"), "unknown name 'model'; did you mean 'source'?"
    yield lambda: functions.plan(DEMO, model="x"), "unknown name 'model'; did you mean 'source'?"
    yield lambda: functions.fold(DEMO, mla, to="gqa"), "unknown name 'to'; did you mean 'target'?"
    yield lambda: functions.plan(DEMO, progress=3), "progress is 3; it should be a function of"
    yield lambda: functions.plan(DEMO, speed=True), "unknown name 'speed'; did you mean 'goal'?"
    yield lambda: functions.plan(DEMO, zzz=1), "unknown name 'zzz'; known: source, context, memory"
    yield lambda: functions.fold(DEMO, mla, zzz=1), "unknown name 'zzz'; known: source, target, out"
    yield lambda: functions.fold(DEMO, mla, progres=1), "unknown name 'progres'; did you mean 'progress'?"
    yield lambda: functions.GQA(2), "GQA takes values by name; write GQA(kv_heads=2)"
    yield lambda: functions.MQA(2), "MQA takes values by name; write MQA()"
    yield lambda: functions.MQA(kv_heads=1), "unknown name 'kv_heads'; none is taken here"
    yield lambda: functions.MLA(kv_budgt=0.5), "unknown name 'kv_budgt'; did you mean 'kv_budget'?"


def test_a_text_that_shows_next_to_nothing_is_named(folded: Folded, work: Path) -> None:
    (work / "letter.txt").write_text("a" * 4000)
    calibrated = {"calibration": str(work / "letter.txt"), "sequences": 4, "length": 16, "refine": 0}
    narrow = kvfold.fold(DEMO, kvfold.MQA(), out=work / "narrow", **calibrated)
    for notices in (narrow.notices, narrow.record["notices"]):
        assert sum("moves 1.3 of 128 directions of the first layer's input" in text for text in notices) == 1
    (work / "sentence.txt").write_text("The quick brown fox jumps over the lazy dog and runs away. " * 400)
    calibrated = {"calibration": str(work / "sentence.txt"), "sequences": 8, "length": 128, "refine": 0}
    repeated = kvfold.fold(DEMO, kvfold.MQA(), out=work / "repeated", **calibrated)
    assert sum("repeats itself: its 1,024 tokens have " in text for text in repeated.notices) == 1
    assert not [text for text in folded.notices if "directions of" in text or "repeats itself" in text]


def test_the_callers_settings_change_nothing(work: Path) -> None:
    """Neither numbers nor whether it works; they are the caller's again behind the call."""
    few = {"stages.0.tokens": 128, "stages.0.batch_tokens": 64, "data.seq_len": 32, "device": "cpu"}

    def bits(name: str) -> list[str]:
        kvfold.fold(DEMO, kvfold.MLA(kv_budget="25%"), out=work / name, sequences=2, length=16, refine=1)
        run = kvfold.train(work / name, settings=few)
        found = kvfold.evaluate(run.directory, text="stdlib", window=64, max_windows=1)
        weights = [path / "model.safetensors" for path in (work / name, run.directory)]
        return [*(hashlib.sha256(file.read_bytes()).hexdigest() for file in weights), str(found["kl.mean"])]

    def settings() -> list[Any]:
        autocast, precision = torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision()
        dtypes = torch.get_default_dtype(), torch.empty(0).device.type
        return [dtypes, autocast, precision, torch.is_inference_mode_enabled(), np.geterr()]

    plain = bits("plain")
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.device("meta"), torch.autocast("cpu"), torch.inference_mode(), np.errstate(all="raise"):
            before = settings()
            assert bits("set") == plain
            assert kvfold.verify(work / "set").failures == []
            assert settings() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


def test_a_precision_set_by_torchs_newer_names() -> None:
    """Behind them torch's older function for it raises."""
    product = torch.backends.cuda.matmul
    before, product.fp32_precision = product.fp32_precision, "tf32"
    try:
        assert kvfold.verify(DEMO, run=False).failures == []
        assert product.fp32_precision == "tf32"
    finally:
        product.fp32_precision = before


@pytest.mark.parametrize("stream", [None, SimpleNamespace(write=len, flush=lambda: None)])
def test_a_stderr_that_is_no_file(stream: Any, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    name = f"of-{type(stream).__name__}"
    folded = kvfold.fold(DEMO, kvfold.MQA(), out=work / name, sequences=4, length=16, refine=0)
    assert folded.load().num_parameters() > 0


def test_half_of_a_launchers_variables(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(kvfold.InvalidInput, match=r"^the environment has RANK=1, where a launched"):
        kvfold.fold(DEMO, kvfold.MQA(), out=work / "ranked", calibration="none")


def test_mistakes_are_one_sentence(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for call, words in (*mistakes(work), *wrong_values(work), *wrong_names()):
        with pytest.raises(kvfold.InvalidInput) as caught:
            call()
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_a_checkpoint_that_fails_its_check_is_not_published(folded: Folded, work: Path) -> None:
    broken = work / "broken"
    shutil.copytree(folded.directory, broken)
    config = json.loads((broken / "config.json").read_text())
    config["kv_lora_rank"] -= 1
    (broken / "config.json").write_text(json.dumps(config))
    assert kvfold.verify(broken, run=False).failures
    with pytest.raises(kvfold.InvalidInput, match="does not pass kvfold verify, so nothing was uploaded"):
        kvfold.publish(broken, "me/broken", verify="lint", dry_run=True)
