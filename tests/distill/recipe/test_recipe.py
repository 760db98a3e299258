"""Recipes: mistakes are told in one sentence that names the key."""

import re
from pathlib import Path

import pytest
import yaml

from kvfold import recipes
from kvfold.core.errors import InvalidInput
from kvfold.distill.recipe.data_section import Data, TextSource
from kvfold.distill.recipe.recipe import Lora, Recipe, Save, ScheduleName, Stage, differences
from kvfold.distill.recipe.recipe_file import as_recipe
from kvfold.distill.stages.optimizer import SCHEDULES, learning_rate

from ...support.distillation import command, refuses, rows

ALIGN = "losses: {attention_output: 1}"
STREAM = f"{{name: b, tokens: 1k, lr: 1e-4, mode: stream, {ALIGN}, train: attention}}"
GOOD = """
schema: 1
student: ./student
output: ./out
data: {source: stdlib, seq_len: 128}
stages:
  - {name: kl, tokens: 5M, lr: 5e-5}
"""


def write(directory: Path, text: str) -> Path:
    file = directory / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("name", ["demo/distill.yaml", "llama-3.2-1b-mla.yaml"])
def test_shipped_recipes_are_valid(name: str) -> None:
    assert as_recipe(Path(recipes.__file__).parent / name).windows > 0


def test_a_short_recipe_is_enough(tmp_path: Path) -> None:
    recipe = as_recipe(write(tmp_path, GOOD))
    assert recipe.stages[0].tokens == 5_000_000
    assert recipe.stages[0].lr == 5e-5
    assert recipe.steps(recipe.stages[0]) == 153
    assert recipe.windows == 153 * 256
    assert recipe.resolved()["stages"][0]["batch_tokens"] == 256 * 128
    again = Recipe.model_validate(recipe.resolved())
    assert again.resolved() == recipe.resolved()
    assert (again.windows, again.few_steps()) == (recipe.windows, [])


@pytest.mark.parametrize(("tokens", "step_tokens", "steps"), [
    ("200k", 1024, 196),
    ("100k", 512, 196),
    ("2M", 16384, 123),
    ("20M", 65536, 306),
    ("6k", 128, 47),
    ("1", 128, 1),
])  # fmt: skip
def test_the_batch_follows_from_the_tokens(tokens: str, step_tokens: int, steps: int, tmp_path: Path) -> None:
    recipe = as_recipe(write(tmp_path, GOOD.replace("5M", tokens)))
    assert recipe.step_tokens(recipe.stages[0]) == step_tokens
    assert recipe.steps(recipe.stages[0]) == steps


@pytest.mark.parametrize(("stage", "steps", "remedy"), [
    ("tokens: 200k, batch_tokens: 65536", "4 optimizer steps of 65536",
     "batch_tokens 3968 or less would give it 50"),
    ("tokens: 6k", "47 optimizer steps of 128", "50 steps of one window take 6400 tokens"),
    ("tokens: 1", "1 optimizer step of 128", "50 steps of one window take 6400 tokens"),
])  # fmt: skip
def test_few_steps_are_told(stage: str, steps: str, remedy: str, tmp_path: Path) -> None:
    recipe = as_recipe(write(tmp_path, GOOD.replace("tokens: 5M", stage)))
    recover = "recovers" if steps.startswith("1 ") else "recover"
    assert recipe.few_steps() == [f"stage kl has {steps} tokens, which {recover} little; {remedy}"]


def test_a_batch_that_is_rounded_down_is_told(tmp_path: Path) -> None:
    told = "stage kl: batch_tokens 200 is rounded down to 128, 1 window of data.seq_len 128"
    for batch, sentences in (("200", [told]), ("256", []), (None, [])):
        given = GOOD if batch is None else GOOD.replace("lr:", f"batch_tokens: {batch}, lr:")
        assert as_recipe(write(tmp_path, given)).rounded_batches() == sentences


# Keys of the stage, and what is said of them after its name.
STAGE_MISTAKES = """
leraning_rate: 5e-5 -> unknown key 'leraning_rate' in stages[0]; did you mean 'lr'?
losses: kl -> losses is 'kl'; each loss has a weight; write {kl: 1.0}
losses: [kl, ce] -> each loss has a weight; write {kl: 1.0, ce: 1.0}
losses: {kl: true} -> losses: kl is True; it should be a number
losses: {kld: 1} -> losses is 'kld'; it should be 'kl', 'reverse_kl', 'jsd', 'ce', 'hidden_mse',
losses: {kl: 0} -> at least one loss needs a weight above 0
losses: {kl: 1e308} -> losses.kl is '1e308'; it should be less than or equal to
losses: {kl: 1, attention_output: 1} -> attention_output is a loss of mode: layerwise
lr: -1 -> lr is -1; it should be greater than 0
lr: fast -> lr is 'fast'; it should be a number
lr: true -> lr is True; it should be a number
lr: .inf -> lr is inf; it should be a finite number
tokens: 10001B -> it should be less than or equal to 10000000000000
tokens: 5Q -> tokens is '5Q'; it should be a number of tokens, such as 5000, 300k, 5M or 1B
train: atention -> train is 'atention'; it should be 'all', 'attention', 'att
schedule: linear -> schedule is 'linear'; it should be 'cosine', 'wsd' or 'constant'
mode: layer -> mode is 'layer'; it should be 'auto', 'end_to_end', 'layerwise' or 'stream'
mode: layerwise -> mode: layerwise runs each layer by itself, so it cannot have the loss kl
temperature: 0 -> temperature is 0; it should be greater than or equal to 0.01
weight_decay: 1.0e+308 -> weight_decay is 1e+308; it should be less than or equal
warmup: 1e300 -> warmup is '1e300'; it should be less than or equal to 10000000000000
warmup: .nan -> warmup is nan; it should be a finite number
grad_clip: 1e300 -> grad_clip is '1e300'; it should be less than or equal to
lora: {rank: 8} -> lora is given, but train is all; write train: lora, or leave lora out
train: lora, lora: {rank: 0} -> lora.rank is 0; it should be greater than or equal to 1
train: lora, lora: {rnk: 4} -> unknown key 'rnk' in stages[0].lora; did you mean 'rank'?
train: lora, lora: {dropout: 0.1} -> lora.dropout is 0.1; it should be 0
name: ../kl -> name is '../kl'; it should consist of letters, digits
batch_tokens: 100 -> batch_tokens is 100, which is less than one window of data.seq_len 128
"""
# Keys of the recipe, of which a dotted one is inside a section.
MISTAKES = """
studnet: a -> unknown key 'studnet'; did you mean 'student'?
data.seqlen: 1 -> unknown key 'seqlen' in data; did you mean 'seq_len'?
lr: 1 -> unknown key 'lr'; it belongs in stages
keep: best -> unknown key 'keep'; it belongs in save or evaluate
quux: 1 -> unknown key 'quux'; known: schema, student
profile: fsdp -> profile is 'fsdp'; it should be 'cpu', 'single', 'ddp', 'fsdp2'
schema: 2 -> schema is 2; it should be 1
data: stdlib -> data is 'stdlib'; it should be a mapping
"""


@pytest.mark.parametrize(("keys", "message"), rows(STAGE_MISTAKES))
def test_mistakes_in_a_stage_are_named(tmp_path: Path, keys: str, message: str) -> None:
    content = yaml.safe_load(GOOD)
    content["stages"][0] |= yaml.safe_load(f"{{{keys}}}")
    with pytest.raises(InvalidInput, match=re.escape(message)) as mistake:
        as_recipe(write(tmp_path, yaml.safe_dump(content)))
    assert "stages[0]" in str(mistake.value)


@pytest.mark.parametrize(("key", "message"), rows(MISTAKES))
def test_mistakes_are_named(tmp_path: Path, key: str, message: str) -> None:
    content = yaml.safe_load(GOOD)
    (name, value) = next(iter(yaml.safe_load(key).items()))
    section, _, last = name.rpartition(".")
    (content[section] if section else content)[last] = value
    with pytest.raises(InvalidInput, match=re.escape(message)):
        as_recipe(write(tmp_path, yaml.safe_dump(content)))


def test_what_is_missing_or_no_yaml_is_named(tmp_path: Path) -> None:
    for before, after, message in (
        (", lr: 5e-5", "", "stages[0].lr is missing: Peak learning rate"),
        ("stages:", "stages: [", "is not YAML"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(message)):
            as_recipe(write(tmp_path, GOOD.replace(before, after)))


def test_a_mistake_ends_the_command_with_code_2(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD.replace("lr:", "leraning_rate:"))
    sentence = "Error: recipe.yaml: unknown key 'leraning_rate' in stages[0]; did you mean 'lr'?\n"
    assert command(file).stderr == sentence
    assert refuses(sentence, file)


def test_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    recipe = as_recipe(
        file, overrides=["stages.0.lr=1e-4", "save.every=7", "data.seq_len=64", "stages.0.tokens=1k"]
    )
    stage = recipe.stages[0]
    assert (stage.lr, recipe.save.every, recipe.data.seq_len, stage.tokens) == (1e-4, 7, 64, 1000)
    for override in ("stages.1.lr=1", "stages.first.lr=1", "lr", "schema.a=1"):
        with pytest.raises(InvalidInput, match="--set"):
            as_recipe(file, overrides=[override])
    with pytest.raises(InvalidInput, match="did you mean 'seed'"):
        as_recipe(file, overrides=["data.sede=1"])


def test_the_mode_follows_from_the_losses() -> None:
    modes = {"kl": "end_to_end", "hidden_mse": "end_to_end", "attention_output": "layerwise"}
    for loss, mode in modes.items():
        stage = {"name": "a", "tokens": 1, "lr": 1, "losses": {loss: 1, "ce": 0}, "train": "attention"}
        assert Stage.model_validate(stage).how == mode
    assert Stage.model_validate({**stage, "mode": "stream"}).how == "stream"


def test_every_key_is_documented() -> None:
    for section in (Recipe, Data, TextSource, Stage, Lora, Save):
        assert [name for name, field in section.model_fields.items() if not field.description] == []


def test_changes_that_alter_the_result_are_found() -> None:
    before = yaml.safe_load(GOOD)
    after = yaml.safe_load(GOOD.replace("5e-5", "4e-5").replace("128", "64")) | {
        "log_every": 3,
        "save": {"every": 3},
    }
    after["stages"][0]["micro_batch"] = 2
    assert differences(before, after) == ["data.seq_len (was 128)", "stages[0].lr (was 5e-5)"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_warms_up_peaks_and_never_rests(schedule: ScheduleName) -> None:
    stage = Stage(name="kl", tokens=1000, lr=2.0, schedule=schedule, warmup=0.1)
    rates = [learning_rate(stage, step, 100) for step in range(100)]
    assert rates[:9] == sorted(rates[:9])
    assert 1.9 < max(rates) <= 2.0
    assert min(rates) > 0
    in_tokens = stage.model_copy(update={"warmup": 100.0})
    assert [learning_rate(in_tokens, step, 100) for step in range(100)] == rates


@pytest.mark.parametrize(("keys", "words"), [
    ("teacher: shared\nstages: [{name: kl, tokens: 1k, lr: 1e-4}]",
     "stages[0].train is all, but teacher: shared"),
    ("stages: [{name: a, tokens: 1k, lr: 1e-4, mode: layerwise, train: attention}]",
     "write losses: {attention_output: 1.0}"),
    *(
        (
            f"stages: [{{name: a, tokens: 1k, lr: 1e-4, mode: {mode}, {ALIGN}, train: {train}}}]",
            f"mode: {mode} trains only attention, and train is {train}; write train: attention",
        )
        for mode, train in (("stream", "all"), ("stream", "lora"), ("layerwise", "all"))
    ),
    (f"stages: [{{name: a, tokens: 1k, lr: 1e-4}}, {STREAM}]",
     "a stage with mode: stream starts from a checkpoint, so it must come before all others"),
    (f"evaluate: {{source: stdlib}}\nstages: [{STREAM}]",
     "evaluate needs a stage with the whole student in memory"),
    ("compile: true\nstages: [{name: a, tokens: 1k, lr: 1e-4, cache_dtype: int4}]",
     "stages[0].cache_dtype is int4, and compile is true"),
    (f"stages: [{STREAM[:-1]}, cache_dtype: int4}}]",
     "mode: stream does not round caches, and cache_dtype is int4"),
])  # fmt: skip
def test_stages_that_could_not_be_run_are_refused_before_any(tmp_path: Path, keys: str, words: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"schema: 1\nstudent: s\noutput: o\ndata: {{source: stdlib, seq_len: 8}}\n{keys}\n")
    with pytest.raises(InvalidInput) as refused:
        as_recipe(recipe)
    assert words in str(refused.value)
