"""Folded and absorbed models as other libraries wrap them.

Weights that are elsewhere, adapters, copies, engines.
"""

import ast
import copy
import inspect
import pickle
import textwrap
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import kvfold
from kvfold.core.errors import InvalidInput
from kvfold.models.shipped.attention_kvfold import FORMS
from kvfold.models.shipped.layers_kvfold import LEVEL
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

from ...support.folds import fold_latent
from ...support.latent_decoding import IDS, counted, latent_model
from ...support.tiny import make

MODELS = ("decoupled", "intact", "absorbed")


def made(name: str, directory: Path, family: str = "llama", **options: Any) -> Any:
    if name == "absorbed":
        return kvfold.absorb(latent_model(v_head_dim=16))
    source = make(directory / family, family, num_key_value_heads=4)
    fold = fold_latent(source, "--kv-budget", "50%", "--container", "remote", "--rope", name)
    return KvfoldForCausalLM.from_pretrained(fold, dtype=torch.float32, **options).eval()


@torch.no_grad()
def at_once(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


@torch.no_grad()
def by_token(model: Any) -> Tensor:
    """The same logits, the last eight tokens of them one by one from the cache."""
    first = model(input_ids=IDS[:, :-8], use_cache=True)
    steps = [model(input_ids=IDS[:, [t]], past_key_values=first.past_key_values).logits for t in range(-8, 0)]
    return torch.cat([first.logits, *steps], dim=1)


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_elsewhere_until_a_module_is_called(name: str, tmp_path: Path) -> None:
    expected = at_once(made(name, tmp_path / "whole"))
    model = accelerate.cpu_offload(made(name, tmp_path / "away"), execution_device=torch.device("cpu"))
    check(by_token(model), expected)


def test_hooks_that_move_no_weights_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate puts them on every module of a model on several GPUs."""
    model = accelerate.dispatch_model(made("absorbed", tmp_path), {"": "cpu"}, force_hooks=True)
    assert hasattr(model.model.layers[0].self_attn.kv_b_proj, "_hf_hook")
    with counted(monkeypatch) as taken:
        by_token(model)
    assert len(taken) == 2 * 8, "both layers at every step"


def test_a_model_of_deepseeks_may_be_absorbed_in_half_precision_and_offloaded() -> None:
    model = kvfold.absorb(
        accelerate.cpu_offload(latent_model(v_head_dim=16).half(), execution_device=torch.device("cpu"))
    )
    assert by_token(model).isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_is_heard_in_decoding_too(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    before = at_once(model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["kv_b_proj"])).eval()
    for key, weight in adapted.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(weight, 0.0, 0.3)
    expected = at_once(adapted)
    assert (expected - before).abs().max() > 1e-2
    check(by_token(adapted), expected)
    check(by_token(adapted.merge_and_unload()), expected)


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_pickles_compute_the_same(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    expected = by_token(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check(by_token(other), expected)
        assert type(other) is type(model)
        with torch.no_grad():
            next(other.parameters()).zero_()
    check(by_token(model), expected)


@pytest.mark.parametrize(
    ("form", "family"), [("decoupled", "gemma2"), ("intact", "gemma2"), ("intact", "gpt_oss")]
)
def test_caps_and_sinks_count_in_prefill_by_sdpa_too(form: str, family: str, tmp_path: Path) -> None:
    expected = at_once(made(form, tmp_path / "eager", family, attn_implementation="eager"))
    model = made(form, tmp_path / "sdpa", family)
    # What some releases of transformers choose for some of these families.
    model.config._attn_implementation = "sdpa"
    check(at_once(model), expected)
    check(by_token(model), expected)


def test_what_holds_a_model_is_levelled_with_it() -> None:
    holder = nn.Sequential(latent_model(v_head_dim=16))
    assert kvfold.absorb(holder)[0].config._attn_implementation == LEVEL


def test_a_linearised_latent_in_float16_is_refused(tmp_path: Path) -> None:
    fold = fold_latent(make(tmp_path / "source"), "--kv-budget", "50%", "--container", "stock")
    with pytest.raises(
        InvalidInput, match=r"layers\.0\.self_attn has a linearised latent.* in bfloat16 or float32"
    ):
        kvfold.absorb(AutoModelForCausalLM.from_pretrained(fold, dtype=torch.float16))
    kvfold.absorb(latent_model().half())  # DeepSeek's own norms are


@pytest.mark.parametrize("form", FORMS)
def test_vllm_finds_the_attention_call_in_forward(form: str) -> None:
    """By the text: one name gets what `ALL_ATTENTION_FUNCTIONS` gives, and is called once."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(FORMS[form].forward)))
    lookups = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "ALL_ATTENTION_FUNCTIONS." in ast.unparse(node.value)
    ]
    (name,) = (target.id for node in lookups for target in node.targets if isinstance(target, ast.Name))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]
    assert len(calls) == 1
    assert [ast.unparse(word.value) for word in calls[0].keywords if word.arg == "scaling"] == [
        "self.scaling"
    ]
