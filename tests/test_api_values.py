"""Values that Python gives to the API: numbers of numpy, paths, and `~`."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfold
from kvfold.core.errors import InvalidInput
from kvfold.eval.suites.catalogue import SuiteSettings

DEMO = Path(__file__).parent.parent / "recipes" / "demo"


@pytest.mark.parametrize(("target", "sizes"), [
    (kvfold.MLA(rank=np.int64(32), q_lora_rank=np.int32(16)), {"kv_lora_rank": 32, "q_lora_rank": 16}),
    (kvfold.MLA(rank=1), {"kv_lora_rank": 1}),
    (kvfold.GQA(kv_budget=np.float32(0.5)), {"num_key_value_heads": 4}),
])  # fmt: skip
def test_numbers_of_numpy(target: Any, sizes: dict[str, int], tmp_path: Path) -> None:
    found = kvfold.fold(DEMO, target, out=tmp_path / "out", calibration="none").record["target"]
    assert {name: found[name] for name in sizes} == sizes


def test_numbers_of_numpy_in_other_functions(tmp_path: Path) -> None:
    size: Any = np.int64(32)
    done = kvfold.quantize(DEMO, "w4a16", out=tmp_path / "q", group_size=size)
    assert done.record["quantize"]["group_size"] == 32
    share = np.float32(0.25)
    same = kvfold.plan(DEMO, budgets="25%")
    assert [row["label"] for row in kvfold.plan(DEMO, budgets=share)] == [row["label"] for row in same]


def test_paths_and_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is the home directory in every place, as it is in the name of a source and in a recipe."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("import os\n" * 400)
    small: Any = {"sequences": 2, "length": 16, "refine": 0}
    for text, out in (("~/text.txt", "~/first"), (Path("~/text.txt"), Path("~/second"))):
        found = kvfold.fold(DEMO, kvfold.GQA(kv_heads=2), out=out, calibration=text, **small)
        assert found.directory == Path(str(out).replace("~", str(tmp_path)))
    assert kvfold.verify("~/first", run=False).failures == []
    assert kvfold.quantize("~/first", "fp8", out="~/rounded").directory == tmp_path / "rounded"
    assert kvfold.plan(DEMO, calibration=tmp_path / "text.txt", engines="vllm", sequences=2, length=16).chosen
    found = kvfold.fold(DEMO, kvfold.GQA(kv_heads=2), out="~/both", calibration="self+~/text.txt", **small)
    assert found.request.calibration == f"self+{tmp_path}/text.txt"
    with pytest.raises(kvfold.InvalidInput, match=f"rows {tmp_path}/rows.json cannot be read"):
        kvfold.evaluate("~/first", text="wikitext2-gptq-32", rows="~/rows.json")
    kvfold.evaluate("~/first", text="~/text.txt", window=32, max_windows=1, teacher_cache="~/hidden")
    assert (tmp_path / "hidden").is_dir()
    assert SuiteSettings.read({"task_path": "~/tasks"}).task_path == tmp_path / "tasks"
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(("given", "sentence"), [
    ({"memory": "24 apples"}, "memory is '24 apples'; it should be a size, for example 500MB or 5GB"),
    ({"limit": 1.5}, "limit is 1.5; it should be a whole number"),
    ({"retrieval_keys": 11}, "retrieval_keys is 11; it should be less than or equal to 10"),
    ({"retrieval_seed": 0.5}, "retrieval_seed is 0.5; it should be a whole number"),
    ({"speed_seconds": 0}, "speed_seconds is 0; it should be greater than 0"),
    ({"speed_batch": [1, "x"]}, "speed_batch is [1, 'x']; it should be whole numbers from 1, separated by"),
    ({"ruler_tasks": ["vt", "qa"]}, "ruler_tasks is 'qa'; it should be 'niah_single', "),
])  # fmt: skip
def test_unusable_options_of_suites_are_named_as_in_python(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        SuiteSettings.read(given)
    assert str(caught.value).startswith(sentence)


def test_paths_in_the_mapping_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("import os\n" * 400)
    kvfold.fold(DEMO, kvfold.GQA(kv_heads=2), out=tmp_path / "folded", calibration="none")
    recipe: dict[str, Any] = {
        "schema": 1,
        "student": tmp_path / "folded",
        "teacher": DEMO,
        "output": tmp_path / "distilled",
        "data": {"source": [{"source": tmp_path / "text.txt"}], "seq_len": 32},
        "stages": [{"name": "kl", "tokens": 64, "batch_tokens": 64, "micro_batch": 2, "lr": 1e-4}],
        "device": "cpu",
    }
    assert kvfold.train(recipe).directory == tmp_path / "distilled"


@pytest.mark.parametrize(("device", "sentence"), [
    ("cpu:foo", "device is 'cpu:foo'; it should be one of auto, cpu, cuda, or cuda:N"),
    (0, "device is 0; it should be one of auto, cpu, cuda, or cuda:N"),
    ("cuda:0", "device cuda:0: torch finds no CUDA device here; use device cpu"),
    ("cuda:7", "device is 'cuda:7'; torch finds cuda:0 to cuda:0 here"),
])  # fmt: skip
def test_absent_devices(device: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentences are kvfold's, whichever library would find the mistake."""
    folded = kvfold.fold(DEMO, kvfold.GQA(kv_heads=2), out=tmp_path / "out", calibration="none")
    monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda:7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(device == "cuda:7"))
    with pytest.raises(kvfold.InvalidInput) as caught:
        folded.load(device=device)
    assert str(caught.value) == sentence


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc, where nobody can make a directory")
def test_a_place_where_nothing_can_be_written_is_named_alone() -> None:
    with pytest.raises(kvfold.InvalidInput, match="cannot write /proc/x: nothing can be made in /proc"):
        kvfold.quantize(DEMO, "fp8", out="/proc/x")


def test_texts_are_read_as_the_numbers_that_they_are() -> None:
    with pytest.raises(InvalidInput, match=r"^batch is 'x'; it should be a whole number$"):
        kvfold.plan(DEMO, batch="x")
    assert kvfold.GQA(kv_heads="2") == kvfold.GQA(kv_heads=2)
    assert kvfold.MLA(rank="8") == kvfold.MLA(rank=8)
    with pytest.raises(InvalidInput, match="rank is 'x'; it should be a whole number or 'full'"):
        kvfold.MLA(rank="x")


def test_a_number_of_more_digits_than_python_writes() -> None:
    with pytest.raises(kvfold.InvalidInput, match="seed is a number of more digits than Python writes"):
        kvfold.plan(DEMO, seed=10**5000)
    with pytest.raises(InvalidInput, match=r"^batch is .*; it should be less than or equal to 1000000000$"):
        kvfold.plan(DEMO, batch=10**400)


@pytest.mark.parametrize("wrong", [{"sequences": 10**5000}, {"context": 10**14}, {"length": 2**70}])
def test_numbers_beyond_all_use_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    (name,) = wrong
    for call in (
        partial(kvfold.plan, DEMO),
        partial(kvfold.fold, DEMO, kvfold.GQA(kv_heads=1), out=tmp_path / "out"),
    ):
        with pytest.raises(InvalidInput, match=rf"^{name} is .*; it should be .* or equal to 1000000000$"):
            call(**wrong)


_HUGE = 10**30


def test_counts_have_a_maximum_in_every_function(tmp_path: Path) -> None:
    """One that is larger than all of use is refused at once, whatever reads it."""
    from kvfold.distill.recipe.recipe import Lora, Save
    from kvfold.migration.migration_options import MigrationOptions

    out, target = tmp_path / "out", kvfold.MLA(kv_budget="50%")
    most = "should be less than or equal to"
    for name in ("refine", "jobs", "shard_size"):
        with pytest.raises(InvalidInput, match=f"^{name} is {_HUGE}; it {most}"):
            kvfold.fold(DEMO, target, out=out, **{name: _HUGE})
    asked = {"model": str(DEMO), "to": "mla", "until": "kl<1", "out": out}
    for name in ("window", "max_windows", "sequences", "refine"):
        with pytest.raises(InvalidInput, match=f"^{name} is {_HUGE}; it {most}"):
            MigrationOptions.read({**asked, name: _HUGE})
    for section, name in ((Lora, "rank"), (Save, "every"), (Save, "keep")):
        with pytest.raises(InvalidInput, match=f"^{name} is {_HUGE}; it {most}"):
            section.read({name: _HUGE})
    for name in ("window", "max_windows", "batch_size"):
        with pytest.raises(InvalidInput, match=f"^{name} is {_HUGE}; it {most}"):
            kvfold.evaluate(DEMO, text="stdlib", **{name: _HUGE})
    for suite, name in (("tasks", "limit"), ("tasks", "fewshot"), ("retrieval", "retrieval_seed")):
        with pytest.raises(InvalidInput, match=f"^{name} is {_HUGE}; it {most}"):
            kvfold.evaluate(DEMO, suites=[suite], **{name: _HUGE})
    with pytest.raises(InvalidInput, match=f"^cpu_memory is {_HUGE}; it {most}"):
        kvfold.evaluate(DEMO, text="stdlib", device_map="auto", cpu_memory=_HUGE)


def test_nothing_is_kept_inside_a_model(tmp_path: Path) -> None:
    """Neither in a source nor in an output, whichever function keeps it."""
    source = Path(shutil.copytree(DEMO, tmp_path / "source"))
    fold = kvfold.fold(source, kvfold.GQA(kv_heads=2), out=tmp_path / "fold", calibration="none").directory
    before = sorted(tmp_path.rglob("*"))
    for model in (source, fold):
        for name, more in (
            ("teacher_cache", {"text": "stdlib"}),
            ("task_cache", {"suites": ["tasks"]}),
            ("offload_dir", {"text": "stdlib", "device_map": "auto"}),
        ):
            with pytest.raises(InvalidInput, match=rf"^{name} {model}/kept is {model} or .*; name a place"):
                kvfold.evaluate(fold, **{name: model / "kept"}, **more)  # type: ignore[arg-type]
    for name in ("save_statistics", "png"):
        with pytest.raises(InvalidInput, match=f"^{name} {source}/x.* is {source} or inside it"):
            kvfold.plan(source, **{name: source / ("x.png" if name == "png" else "x.safetensors")})
    assert sorted(tmp_path.rglob("*")) == before
