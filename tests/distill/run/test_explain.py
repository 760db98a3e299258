"""`distill validate` and `distill explain`: what they find, what they say, and that a run stays as it was."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold.cli import main as kvfold
from kvfold.distill.recipe.recipe import Recipe, flatten
from kvfold.distill.run.footprint import footprint, skeleton
from kvfold.distill.stages.weights import set_trainable

from ...support.distillation import command, refuses, write_recipe
from ..conftest import MakeRecipe


@pytest.fixture
def file(make_recipe: MakeRecipe, tmp_path: Path) -> Path:
    return write_recipe(make_recipe(), tmp_path / "recipe.yaml")


def test_validate_tells_of_every_file(file: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(file.read_text().replace("lr:", "rate:"), encoding="utf-8")
    assert (command("validate", file).exit_code, command("validate", file).stdout) == (0, f"{file}: valid\n")
    result = command("validate", wrong, file, tmp_path / "none.yaml", code=2)
    assert result.stdout == f"{file}: valid\n"
    assert "Error: wrong.yaml: unknown key 'rate' in stages[0]" in result.stderr
    assert "none.yaml cannot be read" in result.stderr
    result = command("validate", "--json", wrong, file, code=2)
    found = json.loads(result.stdout)["recipes"]
    assert found[str(file)] is None
    assert "unknown key" in found[str(wrong)]
    assert CliRunner().invoke(kvfold, ["distill", "validate", str(file)]).exit_code == 0
    assert command("validate").exit_code == 2


@pytest.mark.parametrize(("setting", "message"), [
    ("student=./nowhere", "recipe.yaml: student ./nowhere is not a directory, and not a Hub id"),
    ("teacher=/nowhere", "teacher /nowhere is not a directory, and not a Hub id of the form"),
    ("student=TORN", "is truncated, damaged or no safetensors file"),
    ("output=", "output is None"),
    ("output=''", "output is ''; it should name a directory that does not exist yet"),
    ("student=TMP", "has no config.json; name the directory that holds the model"),
    ("student=TEACHER", "has no kvfold.json that names its source; name the teacher"),
    ("output=TMP", "exists and nothing is overwritten; name another with output"),
    ("data.source=./none.jsonl", "data.source ./none.jsonl is neither a file of .txt, .jsonl, .json or"),
    ("evaluate={source: none.txt}", "evaluate.source none.txt is not a file; name a text, or stdlib"),
    ("evaluate={source: TEXT}", "is trained on: it is"),
    ("evaluate={source: stdlib, evry: 3}", "unknown key 'evry' in evaluate; did you mean 'every'?"),
    ("data.seq_len=65", "data.seq_len 65 exceeds the 64 positions of the student"),
    ("trackers=[aim]", "trackers is 'aim'; it should be 'tensorboard', 'wandb' or 'trackio'"),
    ("eval.every=3", "unknown key 'eval'; did you mean 'evaluate'?"),
])  # fmt: skip
def test_validate_finds(
    file: Path, teacher: Path, text: Path, tmp_path: Path, setting: str, message: str
) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(teacher, torn)
    (torn / "model.safetensors").write_bytes((teacher / "model.safetensors").read_bytes()[:-9])
    shutil.copy(teacher.parent / "student" / "kvfold.json", torn)
    names = {"TMP": tmp_path, "TEACHER": teacher, "TEXT": text, "TORN": torn}
    for name, path in names.items():
        setting = setting.replace(name, str(path))
    assert refuses(message, "validate", file, "--set", setting)


def test_what_is_on_the_hub_is_not_looked_up(file: Path) -> None:
    hub = ("--set", "student=org/student", "--set", "teacher=org/teacher")
    assert command("validate", file, *hub).exit_code == 0
    assert (
        "Memory and time are not shown"
        in command("explain", file, "--set", "student=org/student", code=0).stdout
    )


def test_explain_says_where_values_come_from(tmp_path: Path, student: Path) -> None:
    file = tmp_path / "short.yaml"
    stage = {"name": "kl", "tokens": "5k", "lr": 1e-4, "batch_tokens": "1k"}
    content = {
        "schema": 1, "student": str(student), "output": "out", "data": {"source": "stdlib", "seq_len": 32},
    }  # fmt: skip
    file.write_text(yaml.safe_dump({**content, "stages": [stage]}), encoding="utf-8")
    result = command(
        "explain", file, "--set", "stages.0.losses.ce=0.5", "--set", "save.every=9", "--json", code=0
    )
    found = json.loads(result.stdout)
    keys = {key["key"]: key for key in found["keys"]}
    assert {name: keys[name]["from"] for name in ("stages[0].tokens", "stages[0].losses.ce", "save.every",
                                                  "save.keep")} == {
        "stages[0].tokens": "file", "stages[0].losses.ce": "--set", "save.every": "--set",
        "save.keep": "default",
    }  # fmt: skip
    assert (keys["stages[0].tokens"]["value"], keys["data.packing"]["value"]) == (5000, "documents")
    assert keys["stages[0].lr"]["meaning"] == (
        "Peak learning rate of AdamW. Default: by the size of the student, as for `kvfold distill FOLD`."
    )
    assert "kvfold[lora]" in command("explain", file).stdout  # brackets are no markup
    assert found["stages"][0]["steps"] == 6
    whole = Recipe.model_validate({**content, "stages": [{**stage, "losses": {"ce": 0.5}}]})
    assert [key["key"] for key in found["keys"]] == list(flatten(whole.resolved()))


@pytest.mark.parametrize("train", ["all", "attention", "lora"])
def test_the_footprint_is_known(make_recipe: MakeRecipe, student: Path, teacher: Path, train: str) -> None:
    if train == "lora":
        pytest.importorskip("peft", reason="pip install peft")
    recipe = make_recipe(train=train)
    found = footprint(recipe, recipe.stages[0], skeleton(student), skeleton(teacher), bf16=False)
    model = AutoModelForCausalLM.from_pretrained(student)
    ours = dict(model.named_parameters())
    size = sum(weight.numel() for weight in ours.values())
    attention = sum(weight.numel() for name, weight in ours.items() if "self_attn" in name)
    adapters = 2 * 2 * 16 * (32 + 32) + 2 * 2 * 16 * (32 + 16)  # q and o, k and v, of two layers
    assert found.weights == size
    assert found.trained == {"all": size, "attention": attention, "lora": adapters}[train]
    assert found.memory["optimizer"] == 8 * found.trained
    assert found.memory["teacher"] == 4 * sum(
        weight.numel() for weight in AutoModelForCausalLM.from_pretrained(teacher).parameters()
    )
    assert found.flops is not None
    assert found.flops >= 4 * (size - 32 * 5)


def test_a_streamed_stage_holds_a_layer_each(make_recipe: MakeRecipe, student: Path, teacher: Path) -> None:
    recipe = make_recipe(mode="stream", losses={"attention_output": 1.0}, train="attention")
    models = skeleton(student), skeleton(teacher)
    found = footprint(recipe, recipe.stages[0], *models, bf16=True).memory
    ours, theirs = (
        {name: weight.numel() for name, weight in model.named_parameters() if "layers.0." in name}
        for model in models
    )
    attention = sum(count for name, count in ours.items() if "self_attn" in name)
    assert {name: found[name] for name in ("weights", "gradients", "optimizer", "teacher")} == {
        "weights": 4 * sum(ours.values()), "gradients": 4 * attention, "optimizer": 8 * attention,
        "teacher": 2 * sum(theirs.values()),
    }  # fmt: skip


@pytest.mark.parametrize(("tied", "bf16"), [(True, True), (True, False), (False, False)])
def test_a_large_embedding_first(tied: bool, bf16: bool, make_recipe: MakeRecipe, teacher: Path) -> None:
    """Which is in memory next to the first layer, of one model at a time."""
    recipe = make_recipe(mode="stream", losses={"attention_output": 1.0}, train="attention")
    config = AutoConfig.from_pretrained(teacher)
    config.vocab_size, config.tie_word_embeddings = 8192, tied
    with torch.device("meta"):
        student, source = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    found = footprint(recipe, recipe.stages[0], student, source, bf16=bf16).memory
    layer = sum(weight.numel() for weight in student.model.layers[0].parameters())
    beginning = 4 * (8192 * 32 + 32 + layer)  # the last norm, too
    names = ("weights", "gradients", "optimizer", "teacher")
    assert [found[name] for name in names] == [beginning, 0, 0, 0]


def test_shards_take_a_share_and_the_gathered(make_recipe: MakeRecipe, student: Path, teacher: Path) -> None:
    recipe = make_recipe()
    models = skeleton(student), skeleton(teacher)
    whole, half = (
        footprint(recipe, recipe.stages[0], *models, False, processes).memory for processes in (1, 2)
    )
    assert "gathered" not in whole
    for name in ("weights", "gradients", "optimizer", "teacher"):
        assert half[name] == whole[name] // 2
    around = 4 * 258 * 32  # the embedding, which is the head too
    layers = whole["weights"] - around
    assert half["gathered"] > 2 * around + layers / 2  # of both models, and at least a layer
    kept = footprint(recipe, recipe.stages[0], *models, False, 2, keeps_layers=True).memory
    assert kept["gathered"] > half["gathered"]


def test_processes_are_those_of_a_profile(file: Path) -> None:
    alone, shared = (
        command("explain", file, *options, "--json")
        for options in ([], ["--set", "profile=fsdp2", "--processes", "2"])
    )
    found = [json.loads(result.stdout)["stages"][0]["footprint"] for result in (alone, shared)]
    assert [stage["processes"] for stage in found] == [1, 2]
    assert found[1]["memory_bytes"]["optimizer"] == found[0]["memory_bytes"]["optimizer"] // 2
    assert (
        "kl: memory of each of 2 processes"
        in command("explain", file, "--set", "profile=zero2", "--processes", "2").stdout
    )
    sentence = "--processes 2 needs a profile with several processes; add --set profile=ddp (or fsdp2, zero2"
    assert refuses(sentence, "explain", file, "--processes", "2")


def test_a_shared_teacher_takes_its_own(make_recipe: MakeRecipe, student: Path, teacher: Path) -> None:
    recipe = make_recipe(train="attention", teacher="shared")
    found = footprint(recipe, recipe.stages[0], skeleton(student), skeleton(teacher), bf16=False)
    weights = AutoModelForCausalLM.from_pretrained(teacher).named_parameters()
    assert found.memory["teacher"] == 4 * sum(
        weight.numel() for name, weight in weights if "self_attn" in name
    )


@pytest.mark.parametrize("train", ["all", "lora"])
def test_activations_are_told_about_right(
    train: str, make_recipe: MakeRecipe, student: Path, teacher: Path
) -> None:
    """Against what autograd really keeps of a step, counted once a storage."""
    recipe = make_recipe(micro_batch=4, train=train)
    found = footprint(recipe, recipe.stages[0], skeleton(student), skeleton(teacher), bf16=False)
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    set_trainable(model, recipe.stages[0])
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_BSD = model.base_model(torch.zeros(4, 32, dtype=torch.int64)).last_hidden_state
    assert hidden_BSD.requires_grad
    assert 0.5 < found.memory["activations"] / sum(kept.values()) < 2


def test_what_the_c_library_holds_is_counted_on_a_cpu(
    make_recipe: MakeRecipe, student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of SmolLM2-135M with adapters took 3.8 GiB, 0.65 of them for libraries, where 2.5 were allocated."""
    recipe = make_recipe()
    models = skeleton(student), skeleton(teacher)
    found = footprint(recipe, recipe.stages[0], *models, bf16=False).memory
    allocated = sum(size for name, size in found.items() if name != "allocator")
    assert sum(found.values()) - allocated == (found["activations"] + found["logits"]) // 2
    assert "allocator" not in footprint(recipe, recipe.stages[0], *models, False, 2).memory
    monkeypatch.setattr("kvfold.distill.run.footprint._has_gpu", lambda recipe: True)
    assert "allocator" not in footprint(recipe, recipe.stages[0], *models, bf16=False).memory


def test_a_step_counts_only_its_windows(make_recipe: MakeRecipe, student: Path, teacher: Path) -> None:
    """Recipes that `kvfold distill FOLD` writes have micro-batches larger than their steps."""
    recipes = [make_recipe(micro_batch=size) for size in (3, 6, 64)]
    found = [
        footprint(recipe, recipe.stages[0], skeleton(student), skeleton(teacher), bf16=False).memory
        for recipe in recipes
    ]
    assert found[1] == found[2]
    assert found[1]["activations"] == 2 * found[0]["activations"]
    assert recipes[2].pass_windows(recipes[2].stages[0], processes=4) == 2


def test_a_dry_run_shows_the_resolved_recipe(file: Path) -> None:
    result = command(file, "--dry-run", "--profile", "cpu", code=0)
    shown = yaml.safe_load(result.stdout.split("Stages")[0])
    assert shown == yaml.safe_load(file.read_text(encoding="utf-8")) | {"profile": "cpu"}
    stage = shown["stages"][0]
    assert f"{stage['tokens']:,}" in result.stdout


def test_a_dry_run_refuses_what_the_run_refuses(file: Path, teacher: Path, tmp_path: Path) -> None:
    """It checks the models and texts too, and an output that is there already."""
    sentence = "has no kvfold.json that names its source; name the teacher"
    assert refuses(sentence, file, "--dry-run", "--set", f"student={teacher}")
    refused = command(file, "--dry-run", "--json", "--set", "data.source=./none.jsonl")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert command(file, "--dry-run", "--set", f"output={tmp_path}").exit_code == 2
