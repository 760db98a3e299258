"""Values as wide as keys, and bounded scores: torch's fused kernel gives the same, whatever the mask."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2PreTrainedModel

import kvfold
from kvfold.checkpoints.quantised.packed_checkpoint import open_checkpoint
from kvfold.distill.stages.capture import capturing
from kvfold.eval.options import Options
from kvfold.models.causal_lm import load
from kvfold.models.fused_attention import level
from kvfold.models.layered_model import LayeredModel
from kvfold.models.shipped.layers_kvfold import LEVEL

from ..support.folds import fold_latent
from ..support.latent_decoding import IDS, MASK, latent_model
from ..support.tiny import make
from ..support.tokenizers import save_tokenizer

FUSED = "_scaled_dot_product_flash_attention_for_cpu"
CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "padded": {"attention_mask": MASK},
    "packed": {"position_ids": torch.cat([torch.arange(15), torch.arange(25)]).expand(2, -1)},
}


class Calls(TorchDispatchMode):
    """The arguments of calls of torch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def seen(model: Any, call: str) -> tuple[Tensor, dict[str, Tensor], bool]:
    """Logits, gradients, and whether the fused kernel computed them."""
    model.zero_grad()
    with Calls() as calls:
        logits = model(input_ids=IDS, use_cache=False, **CALLS[call]).logits[:, 5:]  # padding sees nothing
        logits.square().mean().backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return logits.detach(), grads, FUSED in calls.names


def check(ours: Any, plain: Any, call: str) -> None:
    logits, grads, is_fused = seen(ours, call)
    expected, wanted, was_fused = seen(plain, call)
    assert (is_fused, was_fused) == (True, False)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(
            grads[name], grad, atol=1e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def fold(source: Path, container: str) -> Any:
    """A fold as `distill` and `eval` load it, with the latent's norm that both containers have."""
    linear = ("--latent-norm", "linear") if container == "stock" else ()
    out = fold_latent(source, "--kv-budget", "50%", "--container", container, *linear)
    return load(out, Options(device="cpu", dtype="float32")).model


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["v3", "v2"])
def test_stock_models_compute_the_same(name: str, call: str) -> None:
    check(level(latent_model(name, v_head_dim=16)), latent_model(name, v_head_dim=16), call)


@pytest.mark.parametrize("call", CALLS)
def test_our_container_computes_what_the_stock_class_does(tmp_path: Path, call: str) -> None:
    source = make(tmp_path / "source", "llama", num_key_value_heads=4)
    save_tokenizer(source)
    own, stock = (fold(source, container) for container in ("remote", "stock"))
    assert (own.config._attn_implementation, stock.config._attn_implementation) == ("sdpa", LEVEL)
    logits, _, is_fused = seen(own, call)
    expected, _, was_fused = seen(stock, call)
    assert (is_fused, was_fused) == (True, True)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_losses_see_values_as_wide_as_they_are(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "llama", num_key_value_heads=4)
    save_tokenizer(source)
    for container in ("remote", "stock"):
        model = fold(source, container)
        with capturing(model, attention=True) as captured:
            model(input_ids=IDS, use_cache=False)
        for query, key, value in captured.attention:
            assert value.shape[-1] < key.shape[-1] == query.shape[-1]


def test_prefill_of_an_absorbed_model_is_fused() -> None:
    model = kvfold.absorb(latent_model(v_head_dim=16))
    with Calls() as calls, torch.no_grad():
        cache = model(input_ids=IDS, use_cache=True).past_key_values
    assert FUSED in calls.names
    with Calls() as calls, torch.no_grad():
        model(input_ids=IDS[:, :1], past_key_values=cache)
    assert "bmm" in calls.names
    assert FUSED not in calls.names


def test_what_is_not_meant_stays_as_it_is(tmp_path: Path) -> None:
    llama = AutoModelForCausalLM.from_pretrained(make(tmp_path / "llama", "llama"))
    assert level(llama).config._attn_implementation == "sdpa"
    eager = latent_model()
    eager.set_attn_implementation("eager")
    assert level(eager).config._attn_implementation == "eager"
    level(latent_model()).save_pretrained(tmp_path / "saved")
    assert LEVEL not in json.dumps(json.loads((tmp_path / "saved" / "config.json").read_text()))


@pytest.mark.parametrize("layered", [False, True])
def test_a_bound_on_scores_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layered: bool) -> None:
    """Transformers up to 5.19 takes an attention for Gemma 2 that leaves the bound out."""
    source = make(tmp_path / "source", "gemma2")
    save_tokenizer(source)
    eager, unbounded = (
        AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager", **options)
        for options in ({}, {"attn_logit_softcapping": None})
    )
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    if layered:
        model = LayeredModel(open_checkpoint(source), attention=None).model
        assert model.config._attn_implementation == "eager"
        return
    model = load(source, Options(device="cpu", dtype="float32")).model
    with torch.no_grad():
        found, expected, wrong = (one(input_ids=IDS).logits for one in (model, eager, unbounded))
    assert torch.equal(found, expected)
    assert (wrong - expected).abs().max() > 1e-3 * expected.std()  # otherwise nothing is tested here
