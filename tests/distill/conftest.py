"""A teacher, its pooled copy and a text, all tiny: what every test here trains on."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvfold.checkpoints.record import describe, write_record
from kvfold.distill.recipe.recipe import Recipe

from ..support.distillation import weights
from ..support.documents import write_documents
from ..support.tokenizers import save_tokenizer

MakeRecipe = Callable[..., Recipe]

# Matrices this small lose by threads, and the same number of them gives the same bits in child processes.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tied head; large weights, so that it is sure of something."""
    directory = tmp_path_factory.mktemp("models") / "teacher"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def student(teacher: Path) -> Path:
    """The teacher with key/value heads averaged in pairs, in bfloat16; a record names the teacher."""
    directory = teacher.parent / "student"
    config = LlamaConfig.from_pretrained(teacher, num_key_value_heads=2)
    state = AutoModelForCausalLM.from_pretrained(teacher).state_dict()
    for name in [name for name in state if "k_proj" in name or "v_proj" in name]:
        state[name] = state[name].unflatten(0, (2, 2, 8)).mean(1).flatten(0, 1)
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    model.to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory)
    write_record(
        directory, {"schema": 1, "stage": "convert", "source": describe(teacher, None), "parents": []}
    )
    return directory


@pytest.fixture(scope="session")
def float32_models(student: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A student in float32, so that a missing all-reduce cannot hide in rounding; its head is tied."""
    directory = tmp_path_factory.mktemp("models") / "float32"
    shutil.copytree(student, directory)
    save_file(
        {name: tensor.float() for name, tensor in weights(student).items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    return {"student": str(directory), "teacher": str(teacher)}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 documents of about 300 characters, as jsonl."""
    file = tmp_path_factory.mktemp("data") / "text.jsonl"
    write_documents(file)
    return file


@pytest.fixture(scope="session")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that the training text does not have, in an order of their own."""
    file = tmp_path_factory.mktemp("held") / "held.txt"
    words = ["cache", "entry", "lost", "found", "again", "slot"]
    file.write_text(" ".join(words[(at * at) % 6] + str(at % 17) for at in range(200)), encoding="utf-8")
    return file


@pytest.fixture
def make_recipe(student: Path, text: Path, tmp_path: Path) -> MakeRecipe:
    """Recipes of ten steps of six windows; keywords replace keys of the recipe, or else of its only stage."""

    def make(**changes: Any) -> Recipe:
        stage = {"name": "kl", "tokens": 1920, "lr": 1e-2, "batch_tokens": 192, "micro_batch": 4}
        content = {
            "schema": 1, "student": str(student), "output": str(tmp_path / "out"),
            "data": {"source": str(text), "seq_len": 32}, "stages": [stage], "log_every": 1,
            "precision": "fp32", "device": "cpu",
        }  # fmt: skip
        top = set(Recipe.model_fields)
        stage.update({key: value for key, value in changes.items() if key not in top})
        return Recipe.model_validate(content | {key: value for key, value in changes.items() if key in top})

    return make


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """accelerate keeps the first precision of a process; this one gets another."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
