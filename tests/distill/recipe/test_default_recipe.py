"""Folds as recipes: `kvfold distill DIR` without a file, its settings, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
import yaml

import kvfold
from kvfold.checkpoints.record import read_record, write_record
from kvfold.distill.recipe.default_recipe import RATES, default_recipe, default_stage
from kvfold.distill.recipe.recipe_file import as_recipe

from ...support.distillation import command, refuses, weights
from ...support.folds import WEIGHTS, convert

FEW = ("stages.0.tokens=192", "stages.0.batch_tokens=96", "device=cpu")


@pytest.fixture
def folded(teacher: Path, tmp_path: Path) -> Path:
    """An MLA fold by text that its source wrote, 24 tokens at a time."""
    out = tmp_path / "folded"
    words = ("--to", "mla", "--kv-budget", "50%", "--sequences", "4", "--length", "24", "--effort", "quick")
    convert(teacher, *words, out=out, code=0)
    return out


def test_a_fold_is_trained_on_text_of_its_source(folded: Path) -> None:
    words = [word for setting in FEW for word in ("--set", setting)]
    done = command(folded, *words, code=0)
    out = folded.with_name("folded-distilled")
    assert f"Wrote {out}" in done.stdout
    before, after = weights(folded), weights(out)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    record = read_record(out)
    assert record["distill"]["recipe"]["data"]["source"] == "self"
    assert record["distill"]["recipe"]["data"]["seq_len"] == 24
    again = command(folded, *words)
    assert "is complete already" in again.stdout


def test_python_trains_it_alike_and_returns_the_same_bytes(folded: Path) -> None:
    words = [word for setting in FEW for word in ("--set", setting)]
    other = folded.with_name("by command")
    done = command(folded, *words, "--set", f"output={other}", code=0)
    assert f"Next: kvfold eval '{other}' --text FILE\n" in done.stdout
    settings = {"stages.0.tokens": 192, "stages.0.batch_tokens": 96, "device": "cpu"}
    run = kvfold.train(folded, settings=settings)
    assert run.directory == folded.with_name("folded-distilled")
    assert (run.directory / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_explain_names_the_fold_as_the_origin(folded: Path) -> None:
    done = command("explain", folded, "--set", "data.source=stdlib", "--json", code=0)
    origins = {key["key"]: (key["value"], key["from"]) for key in json.loads(done.stdout)["keys"]}
    assert origins["stages[0].tokens"] == (200_000, "fold")
    assert origins["data.source"] == ("stdlib", "--set")
    assert origins["stages[0].warmup"] == (0.05, "default")
    assert command("validate", folded).exit_code == 0


def test_the_recipe_follows_from_the_record(folded: Path) -> None:
    recipe = as_recipe(folded)
    (stage,) = recipe.stages
    assert (stage.tokens, stage.lr, stage.cache_dtype, recipe.teacher) == (200_000, 1e-4, None, None)
    assert recipe.save.every * 4 <= recipe.steps(stage)
    record = read_record(folded)
    record["calibration"] = {"text": "stdlib", "tokens": 4096, "length": 16, "seed": 0}
    record["cache_dtype"] = {"name": "int4"}
    record["cache"]["layers"] = {"full_attention": 1, "linear_attention": 1}
    (folded / "kvfold.json").unlink()
    write_record(folded, record)
    found = default_recipe(folded)
    assert found["data"] == {"source": "self", "seq_len": 64, "packing": "stream"}  # 64 positions
    assert found["stages"][0]["cache_dtype"] == "int4"


def test_the_output_of_a_relative_place(folded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folded)
    assert default_recipe(Path())["output"] == str(folded.with_name("folded-distilled"))
    monkeypatch.chdir(folded.parent)
    assert default_recipe(Path("folded"))["output"] == "folded-distilled"


def test_larger_models_take_smaller_steps() -> None:
    rates = [default_stage(weights, 1000, 32)["lr"] for weights in (10**8, 2 * 10**9, 10**11)]
    assert rates == [rate for _, rate in RATES]
    assert rates == sorted(rates, reverse=True)


def test_a_stage_without_a_rate_takes_that_of_a_fold_without_a_recipe(folded: Path, tmp_path: Path) -> None:
    content = default_recipe(folded)
    content["stages"].append({**content["stages"][0], "name": "second", "lr": 3e-6})
    del content["stages"][0]["lr"]
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(content))
    for recipe in (as_recipe(file), as_recipe(content)):
        assert [stage.lr for stage in recipe.stages] == [1e-4, 3e-6]
    assert "lr" not in content["stages"][0]


def test_settings_replace_keys_of_any_recipe(folded: Path) -> None:
    first = as_recipe(folded, {"stages.0.lr": 1e-5, "evaluate.source": Path("held.txt")})
    assert first.stages[0].lr == 1e-5
    assert first.evaluate.source == "held.txt"
    second = as_recipe(first, {"stages.0.lr": 2e-5})
    assert second.stages[0].lr == 2e-5
    assert second.evaluate == first.evaluate
    assert as_recipe(first) is first
    # The batch follows from the tokens, whatever the recipe was.
    more = {"stages.0.tokens": "20M"}
    said = {"stages.0.lr": 1e-5, "evaluate.source": "held.txt"}
    assert as_recipe(first, more).resolved() == as_recipe(folded, said | more).resolved()


def test_what_is_no_fold_is_refused(teacher: Path, tmp_path: Path) -> None:
    sentences = {
        teacher: "is a model that is not folded; convert it first with kvfold convert, or name a recipe file",
        tmp_path: "is a directory without a checkpoint; name an output of kvfold convert or a recipe file",
    }
    for directory, sentence in sentences.items():
        assert refuses(f"{directory} {sentence}", directory)
        assert not Path(f"{directory}-distilled.partial").exists()


def test_settings_that_cannot_be_used_are_refused(folded: Path) -> None:
    with pytest.raises(kvfold.InvalidInput, match=r"settings is \['lr'\]; it should be a mapping such as"):
        kvfold.train(folded, settings=["lr"])  # type: ignore[arg-type] # a mistake on purpose
    with pytest.raises(kvfold.InvalidInput, match=r"settings\['stages\.1\.lr'\]: the recipe has no such key"):
        kvfold.train(folded, settings={"stages.1.lr": 1e-4})
    with pytest.raises(kvfold.InvalidInput, match=r"folded: unknown key 'rate' in stages\[0\]"):
        kvfold.train(folded, settings={"stages.0.rate": 1e-4})


def test_one_copy_of_the_weights_can_be_asked_for(folded: Path) -> None:
    few = {"stages.0.tokens": 96, "stages.0.batch_tokens": 96, "device": "cpu"}
    shared = {"teacher": "shared", "stages.0.train": "attention"}
    assert kvfold.train(folded, settings={**few, **shared}).steps == 1
    with pytest.raises(kvfold.InvalidInput, match="write train: attention there, or teacher: null"):
        as_recipe(folded, {"teacher": "shared"})


@pytest.mark.parametrize(
    ("words", "suggested"), [(("--kv-budget", "50%"), True), (("--rank", "full"), False)]
)
def test_convert_suggests_the_training_where_something_is_lost(
    teacher: Path, tmp_path: Path, words: tuple[str, str], suggested: bool
) -> None:
    out = tmp_path / "out"
    done = convert(teacher, "--to", "mla", *words, *WEIGHTS, out=out, code=0)
    assert f"Next: kvfold eval {out} --text FILE\n" in done.stdout
    assert (f"or train it: kvfold distill {out}\n" in done.stdout) is suggested
