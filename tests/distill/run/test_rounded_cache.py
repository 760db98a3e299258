"""Training with a rounded cache: the student reads what an engine would store, and learns to lose less by it."""

from pathlib import Path

import torch

from kvfold.core.cache_dtypes import cache_dtype
from kvfold.distill.run.job import distill
from kvfold.models.caches import cache_argument
from kvfold.models.causal_lm import load_model, load_tokenizer
from kvfold.models.decoder import Decoder
from kvfold.models.stored_cache import StoredCache
from kvfold.texts.corpus import read_text

from ...support.commands import run_main
from ...support.distillation import write_recipe
from ...support.tiny import make
from ..conftest import MakeRecipe

INT4 = cache_dtype("int4")
IDS = torch.arange(8 * 32).reshape(8, 32) ** 2 * 7 % 250


@torch.no_grad()
def _divergence(directory: Path, teacher: Path, text: Path) -> float:
    """Return the KL from the teacher of a model that reads its cache in int4, on its training text."""
    ids = load_tokenizer(teacher)(" ".join(read_text(str(text)).joined.split()))["input_ids"]
    ids_BT = torch.tensor(ids[: 32 * 32]).view(32, 32)
    model = load_model(directory)
    StoredCache(model, INT4)
    wanted, found = (each(ids_BT).logits.log_softmax(-1) for each in (load_model(teacher), model))
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def test_training_with_a_rounded_cache_loses_less_with_that_cache(
    make_recipe: MakeRecipe, teacher: Path, text: Path, tmp_path: Path
) -> None:
    """The teacher itself has nothing else to learn."""
    common = {"student": str(teacher), "teacher": str(teacher), "lr": 3e-4, "tokens": 5760}
    plain = distill(make_recipe(output=str(tmp_path / "plain"), **common))
    rounded = distill(make_recipe(output=str(tmp_path / "rounded"), cache_dtype="int4", **common))
    assert plain.stages[0]["first"]["kl"] < 1e-6
    assert rounded.stages[0]["last"]["kl"] < 0.9 * rounded.stages[0]["first"]["kl"]
    before, without, with_it = (
        _divergence(place, teacher, text) for place in (teacher, plain.output, rounded.output)
    )
    assert without > 0.99 * before
    assert with_it < 0.9 * before


def test_gradients_are_those_of_the_straight_through_estimate_also_of_a_layer_alone(student: Path) -> None:
    model = load_model(student)
    StoredCache(model, INT4)
    model(IDS).logits.square().mean().backward()
    attention = model.model.layers[0].self_attn
    for projection in (attention.k_proj, attention.v_proj, attention.q_proj):
        assert float(projection.weight.grad.abs().max()) > 0
    decoder, hidden_BSD = Decoder(model), torch.randn(8, 32, 32)
    call = decoder.calls(input_ids=IDS)[1]
    alone_BSD = decoder.attend(1, call, hidden_BSD)
    arguments = {**call.named, "hidden_states": hidden_BSD, cache_argument(attention): None}
    whole_BSD, _ = model.model.layers[1].self_attn(**arguments)
    assert alone_BSD.requires_grad
    assert torch.equal(alone_BSD, whole_BSD), "a layer by itself is rounded once"


def test_all_read_rounded(make_recipe: MakeRecipe, tmp_path: Path, student: Path, teacher: Path) -> None:
    aligned = {"losses": {"attention_output": 1.0}, "train": "attention", "lr": 3e-3}
    first = [
        distill(make_recipe(output=str(tmp_path / str(name)), cache_dtype=name, tokens=192, **aligned))
        for name in (None, "int4")
    ]
    exact, rounded = (found.stages[0]["first"]["attention_output"] for found in first)
    assert rounded > 1.001 * exact


def test_it_is_explained_and_checked(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(cache_dtype="fp8_e4m3")
    assert recipe.resolved()["stages"][0]["cache_dtype"] == "fp8_e4m3"
    file = write_recipe(recipe, tmp_path / "recipe.yaml")
    assert "stages[0].cache_dtype" in run_main("distill", "explain", file).output
    wrong = run_main("distill", "validate", file, "--set", "stages.0.cache_dtype=int3", code=2)
    assert "stages[0].cache_dtype is 'int3'" in wrong.output
    assert "nvfp4" in wrong.output


@torch.no_grad()
def test_a_class_that_asks_a_cache_for_its_length_runs_without_one(tmp_path: Path) -> None:
    model = load_model(make(tmp_path / "model", "llama4_text"))
    exact = model(IDS[:2] % 97, use_cache=False).logits
    StoredCache(model, INT4)
    rounded = model(IDS[:2] % 97, use_cache=False).logits
    assert 0 < (rounded - exact).abs().max() < exact.abs().max()
