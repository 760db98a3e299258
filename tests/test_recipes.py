"""Every shipped recipe, from the convert command at its head to the output, on a tiny model of its family."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold.convert.cli import main as convert
from kvfold.distill.cli import main as distill
from kvfold.distill.recipe.recipe_file import as_recipe
from kvfold.distill.run.explain import explain

from .support.commands import run_main
from .support.documents import write_documents
from .support.old_files import add_old_buffers
from .support.tokenizers import save_tokenizer

ROOT = Path(__file__).parent.parent / "recipes"
NAMES = sorted(file.stem for file in ROOT.glob("*.yaml"))
SIZES = {"vocab_size": 258, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
_PAIRED = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
_FULL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
# What stands for the model that a recipe names: as many heads where their number matters, and the options
# that must be smaller.
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama-3.2-1b-mla": ("llama", {**_PAIRED, "tie_word_embeddings": True}, []),
    "llama-2-7b-mla-512": ("llama", _FULL, ["--rank", "8", "--rope-dim", "4"]),
    "qwen2.5-7b-mla": ("qwen2", _PAIRED, ["--rank", "8", "--rope-dim", "4"]),
    "smollm-1.7b-mla": ("llama", {**_FULL, "tie_word_embeddings": True}, []),
    "smollm-135m-gqa": ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}, []),
    "pythia-160m-gqa": ("gpt_neox", {"hidden_size": 96, "num_attention_heads": 12}, []),
}


def commands(name: str) -> Iterator[list[str]]:
    """The commands in the comment at a recipe's head."""
    for line in (ROOT / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("#   kvfold "):
            yield line.removeprefix("#   kvfold ").split()


def test_the_recipes_are_those_that_were_promised() -> None:
    assert set(MODELS) == set(NAMES)
    assert (ROOT / "demo" / "distill.yaml").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_its_commands_make_what_it_reads(name: str) -> None:
    """The head says which command makes the student, and both take their options."""
    first, second = commands(name)
    recipe = as_recipe(ROOT / f"{name}.yaml")
    with convert.make_context("convert", first[1:]) as context:
        assert context.params["out"] == Path(recipe.student)
        assert context.params["to"] == name.split("-")[-1 if not name.endswith("512") else -2]
    with distill.make_context("distill", second[1:]) as context:
        assert context.params["recipe"] == Path("recipes") / f"{name}.yaml"
    assert recipe.output == f"{recipe.student}-distilled"
    assert [stage.how for stage in recipe.stages] == ["end_to_end"]
    assert recipe.evaluate is not None
    for stage in recipe.stages:  # what eight GPUs share evenly
        assert recipe.step_windows(stage) % 8 == 0


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_explained(name: str) -> None:
    found = explain(ROOT / f"{name}.yaml", ["stages.0.tokens=1M"])
    origins = {key["key"]: key["from"] for key in found["keys"]}
    assert (origins["stages[0].tokens"], origins["stages[0].lr"], origins["stages[0].grad_clip"]) == (
        "--set", "file", "default",
    )  # fmt: skip
    assert all(key["meaning"] for key in found["keys"])
    assert "; convert it first (kvfold convert" in found["note"]


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name: str, tmp_path: Path) -> None:
    """Two steps a stage, with an evaluation; the output loads in its own class."""
    family, sizes, smaller = MODELS[name]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **sizes)).save_pretrained(
        tmp_path / "source"
    )
    if family == "gpt_neox":
        add_old_buffers(tmp_path / "source", family)  # as Pythia is published
    save_tokenizer(tmp_path / "source")
    # Has a class of its own, which the folded checkpoint's configuration does not lead to.
    if family == "qwen2":
        own = {
            "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "unk_token": None, "eos_token": "end",
            "pad_token": "end",
        }  # fmt: skip
        (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps(own), encoding="utf-8")
    write_documents(tmp_path / "text.jsonl")
    (tmp_path / "held.txt").write_text(" ".join(str(number**3) for number in range(99)), encoding="utf-8")
    command, _ = commands(name)
    quick = ["--sequences", "2", "--length", "16", "--refine", "2", *smaller]
    run(["convert", str(tmp_path / "source"), *command[2:], *quick, "--out", str(tmp_path / "student")])
    settings = {
        "student": tmp_path / "student", "output": tmp_path / "out", "data.name": "null", "data.seq_len": 32,
        "data.source": tmp_path / "text.jsonl", "evaluate.source": tmp_path / "held.txt", "evaluate.windows": 4,
        "device": "cpu", "precision": "fp32",
        "stages.0.tokens": 256, "stages.0.batch_tokens": 128, "stages.0.micro_batch": 2,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    result = json.loads(run(["distill", str(ROOT / f"{name}.yaml"), *words, "--json"]))
    assert [(stage["name"], stage["steps"]) for stage in result["stages"]] == [("kl", 2)]
    points = json.loads((tmp_path / "out" / "curve.json").read_text())["points"]
    assert [point["step"] for point in points] == [0, 2]
    record = json.loads((tmp_path / "out" / "kvfold.json").read_text())
    assert record["distill"]["steps"] == 2


def run(words: list[str]) -> str:
    result = run_main(*words)
    return result.stdout
