"""Recipes: mistakes are told in one sentence that names the key."""

from pathlib import Path
from typing import get_args

import pytest
import yaml
from click.testing import CliRunner

from kvfold import recipes
from kvfold.core.errors import InvalidInput
from kvfold.core.units import parse_tokens
from kvfold.distill.cli import main
from kvfold.distill.losses import LOSSES
from kvfold.distill.recipe.data_section import Data, TextSource
from kvfold.distill.recipe.recipe import (
    Lora,
    LossName,
    Recipe,
    Save,
    ScheduleName,
    Stage,
    WeightSet,
    differences,
)
from kvfold.distill.recipe.recipe_file import read_recipe
from kvfold.distill.stages.schedule import SCHEDULES, learning_rate
from kvfold.distill.stages.weights import TRAINABLE

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
    assert read_recipe(Path(recipes.__file__).parent / name).windows > 0


def test_a_short_recipe_is_enough(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, GOOD))
    assert recipe.stages[0].tokens == 5_000_000
    assert recipe.stages[0].lr == 5e-5
    assert recipe.steps(recipe.stages[0]) == 153
    assert recipe.windows == 153 * 256
    assert recipe.resolved()["stages"][0]["batch_tokens"] == 256 * 128
    again = Recipe.model_validate(recipe.resolved())
    assert again.resolved() == recipe.resolved()
    assert (again.windows, again.few_steps()) == (recipe.windows, [])


@pytest.mark.parametrize(
    ("tokens", "step_tokens", "steps"),
    [
        ("200k", 1024, 196),
        ("100k", 512, 196),
        ("2M", 16384, 123),
        ("20M", 65536, 306),
        ("6k", 128, 47),
        ("1", 128, 1),
    ],
)
def test_the_batch_follows_from_the_tokens(tokens: str, step_tokens: int, steps: int, tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, GOOD.replace("5M", tokens)))
    assert recipe.step_tokens(recipe.stages[0]) == step_tokens
    assert recipe.steps(recipe.stages[0]) == steps


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        (
            "tokens: 200k, batch_tokens: 65536",
            "stage kl has 4 optimizer steps of 65536 tokens, which recover little; batch_tokens 3968 or less would "
            "give it 50",
        ),
        (
            "tokens: 6k",
            "stage kl has 47 optimizer steps of 128 tokens, which recover little; 50 steps of one window take 6400 "
            "tokens",
        ),
        (
            "tokens: 1",
            "stage kl has 1 optimizer step of 128 tokens, which recovers little; 50 steps of one window take 6400 "
            "tokens",
        ),
    ],
)
def test_few_steps_are_told(stage: str, sentence: str, tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, GOOD.replace("tokens: 5M", stage)))
    assert recipe.few_steps() == [sentence]


def test_a_batch_that_is_rounded_down_is_told(tmp_path: Path) -> None:
    told = "stage kl: batch_tokens 200 is rounded down to 128, 1 window of data.seq_len 128"
    for batch, sentences in (("200", [told]), ("256", []), (None, [])):
        given = GOOD if batch is None else GOOD.replace("lr:", f"batch_tokens: {batch}, lr:")
        assert read_recipe(write(tmp_path, given)).rounded_batches() == sentences


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "lr:",
            "leraning_rate:",
            r"recipe.yaml: unknown key 'leraning_rate' in stages\[0\]; did you mean 'lr'\?",
        ),
        ("student:", "studnet:", r"unknown key 'studnet'; did you mean 'student'\?"),
        (
            "seq_len: 128",
            "seq_len: 128, seqlen: 1",
            r"unknown key 'seqlen' in data; did you mean 'seq_len'\?",
        ),
        ("output:", "lr: 1\noutput:", r"unknown key 'lr'; it belongs in stages"),
        ("lr: 5e-5", "lr: 5e-5, losses: kl", r"losses is 'kl'; each loss has a weight; write \{kl: 1\.0\}"),
        ("lr: 5e-5", "lr: 5e-5, losses: [kl, ce]", r"weight; write \{kl: 1\.0, ce: 1\.0\}"),
        ("output:", "keep: best\noutput:", r"unknown key 'keep'; it belongs in save or evaluate"),
        ("output:", "save: {keep: best}\noutput:", r"save\.keep is 'best'; .*write evaluate\.keep: best"),
        ("output:", "quux: 1\noutput:", r"unknown key 'quux'; known: schema, student"),
        (", lr: 5e-5", "", r"stages\[0\].lr is missing: Peak learning rate"),
        ("lr: 5e-5", "lr: -1", r"stages\[0\].lr is -1; it should be greater than 0"),
        ("lr: 5e-5", "lr: fast", r"stages\[0\].lr is 'fast'; it should be a number$"),
        ("lr: 5e-5", "lr: true", r"stages\[0\].lr is True; it should be a number$"),
        ("lr: 5e-5", "lr: 5e-5, losses: {kl: true}", r"\[0\].losses: kl is True; it should be a number$"),
        ("lr: 5e-5", "lr: .inf", r"stages\[0\].lr is inf; it should be a finite number"),
        ("5M", "10001B", r"stages\[0\].tokens is .*; it should be less than or equal to 10000000000000"),
        (
            "5M",
            "5Q",
            r"stages\[0\].tokens is '5Q'; it should be a number of tokens, such as 5000, 300k, 5M or 1B",
        ),
        (
            "lr:",
            "losses: {kld: 1}, lr:",
            r"stages\[0\].losses is 'kld'; it should be 'kl', 'reverse_kl', 'jsd', 'ce', .* or 'att",
        ),
        ("lr:", "losses: {kl: 0}, lr:", r"at least one loss needs a weight above 0"),
        (
            "lr:",
            "train: atention, lr:",
            r"stages\[0\].train is 'atention'; it should be 'all', 'attention', 'att",
        ),
        (
            "lr:",
            "schedule: linear, lr:",
            r"stages\[0\].schedule is 'linear'; it should be 'cosine', 'wsd' or 'constant'",
        ),
        (
            "lr:",
            "mode: layer, lr:",
            r"stages\[0\].mode is 'layer'; it should be 'auto', 'end_to_end', 'layerwise' or 'stream'",
        ),
        (
            "lr:",
            "mode: layerwise, lr:",
            r"stages\[0\]: mode: layerwise runs each layer by itself, so it cannot have .* kl",
        ),
        (
            "lr:",
            "losses: {kl: 1, attention_output: 1}, lr:",
            r"stages\[0\]: attention_output is a loss of mode: layerwise",
        ),
        ("lr:", "temperature: 0, lr:", r"temperature is 0; it should be greater than or equal to 0.01"),
        ("lr:", "temperature: 1e9, lr:", r"temperature is '1e9'; it should be less than or equal to 100"),
        ("lr:", "weight_decay: 1.0e+308, lr:", r"weight_decay is 1e\+308; it should be less than or equal"),
        (
            "lr:",
            "warmup: 1e300, lr:",
            r"warmup is '1e300'; it should be less than or equal to 10000000000000",
        ),
        ("lr:", "grad_clip: 1e300, lr:", r"grad_clip is '1e300'; it should be less than or equal to"),
        ("lr:", "warmup: .nan, lr:", r"warmup is nan; it should be a finite number"),
        ("lr:", "losses: {kl: 1e308}, lr:", r"losses.kl is '1e308'; it should be less than or equal to"),
        ("lr:", "jsd_beta: 1.5, lr:", r"stages\[0\].jsd_beta is 1.5; it should be less than or equal to 1"),
        (
            "lr:",
            "lora: {rank: 8}, lr:",
            r"stages\[0\]: lora is given, but train is all; write train: lora, or leave lora out",
        ),
        (
            "lr:",
            "train: lora, lora: {rank: 0}, lr:",
            r"stages\[0\].lora.rank is 0; it should be greater than or equal to 1",
        ),
        (
            "lr:",
            "train: lora, lora: {rnk: 4}, lr:",
            r"unknown key 'rnk' in stages\[0\].lora; did you mean 'rank'\?",
        ),
        ("lr:", "train: lora, lora: {dropout: 0.1}, lr:", r"stages\[0\].lora.dropout is 0.1; it should be 0"),
        ("name: kl", "name: ../kl", r"stages\[0\].name is '../kl'; it should consist of letters, digits"),
        (
            "output:",
            "profile: fsdp\noutput:",
            r"profile is 'fsdp'; it should be 'cpu', 'single', 'ddp', 'fsdp2'",
        ),
        (
            "lr:",
            "batch_tokens: 100, lr:",
            r"stages\[0\].batch_tokens is 100, which is less than one window of data.seq_len 128",
        ),
        ("schema: 1", "schema: 2", r"schema is 2; it should be 1"),
        ("{source: stdlib, seq_len: 128}", "stdlib", r"data is 'stdlib'; it should be a mapping"),
        ("stages:", "stages: [", r"is not YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in GOOD
    with pytest.raises(InvalidInput, match=message):
        read_recipe(write(tmp_path, GOOD.replace(before, after)))


def test_a_mistake_ends_the_command_with_code_2(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD.replace("lr:", "leraning_rate:"))
    result = CliRunner().invoke(main, [str(file)])
    assert result.exit_code == 2
    assert (
        result.stderr == "Error: recipe.yaml: unknown key 'leraning_rate' in stages[0]; did you mean 'lr'?\n"
    )


def test_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    recipe = read_recipe(file, ["stages.0.lr=1e-4", "save.every=7", "data.seq_len=64", "stages.0.tokens=1k"])
    assert (recipe.stages[0].lr, recipe.save.every, recipe.data.seq_len, recipe.stages[0].tokens) == (
        1e-4,
        7,
        64,
        1000,
    )
    for override in ("stages.1.lr=1", "stages.first.lr=1", "lr", "schema.a=1"):
        with pytest.raises(InvalidInput, match="--set"):
            read_recipe(file, [override])
    with pytest.raises(InvalidInput, match="did you mean 'seed'"):
        read_recipe(file, ["data.sede=1"])


def test_token_numbers() -> None:
    assert [parse_tokens(text) for text in ("5000", "300k", "1.001M", "1B", "1_000", "1e6")] == [
        5000, 300_000, 1_001_000, 10**9, 1000, 10**6,
    ]  # fmt: skip
    assert parse_tokens("0.05") == 0.05


def test_the_tables_have_what_a_recipe_may_name() -> None:
    for names, table in ((LossName, LOSSES), (ScheduleName, SCHEDULES), (WeightSet, TRAINABLE)):
        assert get_args(names) == tuple(table)


def test_the_mode_follows_from_the_losses() -> None:
    modes = {"kl": "end_to_end", "hidden_mse": "end_to_end", "attention_output": "layerwise"}
    for loss, mode in modes.items():
        stage = {"name": "a", "tokens": 1, "lr": 1, "losses": {loss: 1, "ce": 0}, "train": "attention"}
        assert Stage.model_validate(stage).how == mode
    given = {
        "name": "a",
        "tokens": 1,
        "lr": 1,
        "losses": {"attention_output": 1},
        "mode": "stream",
        "train": "attention",
    }
    assert Stage.model_validate(given).how == "stream"


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


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            "teacher: shared\nstages: [{name: kl, tokens: 1k, lr: 1e-4}]",
            "stages[0].train is all, but teacher: shared",
        ),
        (
            "stages: [{name: a, tokens: 1k, lr: 1e-4, mode: layerwise, train: attention}]",
            "write losses: {attention_output: 1.0}",
        ),
    ],
)
def test_stages_that_could_not_be_run_are_refused_before_any(tmp_path: Path, keys: str, words: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"schema: 1\nstudent: s\noutput: o\ndata: {{source: stdlib, seq_len: 8}}\n{keys}\n")
    with pytest.raises(InvalidInput) as refused:
        read_recipe(recipe)
    assert words in str(refused.value)
