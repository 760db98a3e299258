"""Decoding from the latent computes what expanding it does, and copies nothing of its size."""

import copy
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import kvfold
from kvfold.core.errors import InvalidInput
from kvfold.models.shipped import decoding_kvfold

from ...support.folds import fold_latent
from ...support.latent_decoding import (
    IDS,
    MODELS,
    SIZES,
    WAYS,
    Largest,
    chunks,
    counted,
    generate,
    latent_model,
    steps,
)
from ...support.tiny import make


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_are_the_same(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = latent_model(name)
    expected = generate(model, **WAYS[way])
    assert len(set(expected[0][20:])) > 2, "a model that repeats itself would hide a mistake"
    with counted(monkeypatch) as taken:
        assert generate(kvfold.absorb(model), **WAYS[way]) == expected
    assert taken
    assert all(seen > length for length, seen in taken)


def test_assisted_decoding_absorbs_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, assistant = latent_model(), latent_model(num_hidden_layers=1)
    options = {"assistant_model": assistant, "batch": 1}
    expected = generate(model, **options)
    with counted(monkeypatch) as taken:
        assert generate(kvfold.absorb(model), **options) == expected
    assert any(1 < length < seen / 2 for length, seen in taken)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_pieces(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several tokens at once, on a padded batch, for each kind of mask."""
    model = latent_model(name)
    model.set_attn_implementation(implementation)
    expected = chunks(model)[:, 5:]
    with counted(monkeypatch) as taken:
        torch.testing.assert_close(chunks(kvfold.absorb(model))[:, 5:], expected, atol=2e-5, rtol=1e-4)
    assert [length for length, _ in taken[:: SIZES["num_hidden_layers"]]] == [3, 1, 6]


def test_padding_on_the_right() -> None:
    """A row that ended earlier is masked at its end; what is decoded after it does not see that."""
    mask = torch.ones_like(IDS)
    mask[0, 30:33] = 0
    model = latent_model()
    expected = chunks(model, mask)
    assert (expected - chunks(model, torch.ones_like(IDS)))[0, 33:].abs().max() > 1e-3
    torch.testing.assert_close(chunks(kvfold.absorb(model), mask), expected, atol=2e-5, rtol=1e-4)


def test_masks_of_other_attention_functions() -> None:
    """Of flash attention: padding alone, for one token. Of flex attention: a function of places."""
    module = kvfold.absorb(latent_model()).model.layers[0].self_attn
    query, latent, rope, up_NEC = (
        torch.randn(2, *shape) for shape in ((4, 3, 24), (1, 9, 32), (1, 9, 8), (2, 40, 32))
    )
    up_NEC = up_NEC.flatten(0, 1)
    padding = torch.ones(2, 9, dtype=torch.long)
    padding[1, :4] = 0
    seen = padding.bool()[:, None, None] & torch.ones(3, 9, dtype=torch.bool).tril(6)
    expected, _ = decoding_kvfold.attend(query, latent, rope, up_NEC, seen, 0.2, module)
    last, _ = decoding_kvfold.attend(query[:, :, 2:], latent, rope, up_NEC, padding, 0.2, module)
    torch.testing.assert_close(last, expected[:, :, 2:])
    block = create_block_mask(
        lambda b, _, q, k: (k <= q + 6) & (padding[b, k] == 1), 2, None, 3, 9, device="cpu"
    )
    other, _ = decoding_kvfold.attend(query, latent, rope, up_NEC, block, 0.2, module)
    torch.testing.assert_close(other, expected)
    assert [decoding_kvfold.tells(mask, 3) for mask in (None, padding, seen, block)] == [
        False, False, True, True,
    ]  # fmt: skip
    assert all(decoding_kvfold.tells(mask, 1) for mask in (None, padding, seen, block))


def test_bfloat16_rounds_no_more_than_the_stock_order() -> None:
    exact, model = chunks(latent_model())[:, 5:], latent_model().bfloat16()
    stock = (chunks(model)[:, 5:] - exact).square().mean().sqrt()
    ours = (chunks(kvfold.absorb(model))[:, 5:] - exact).square().mean().sqrt()
    assert ours < 1.25 * stock


@pytest.mark.parametrize("name", ["v3", "v2"])
def test_one_graph_of_a_decoding_step(name: str) -> None:
    """torch.compile finds no break in it, and nothing that depends on data; CUDA graphs need the same."""
    model = kvfold.absorb(latent_model(name))
    torch._dynamo.reset()
    compiled = steps(model, torch.compile(model, fullgraph=True, backend="eager"))
    torch.testing.assert_close(compiled, steps(model, model), rtol=0, atol=5e-5)


def test_nothing_of_the_expansions_size_is_made() -> None:
    """A step makes no tensor larger than the cache that it grows, unlike the stock class."""
    ids, model = torch.randint(97, (2, 100)), latent_model()
    cached = 2 * 101 * SIZES["kv_lora_rank"]
    found = []
    for one in (model, kvfold.absorb(latent_model())):
        cache = one(input_ids=ids, use_cache=True).past_key_values
        with Largest() as largest, torch.no_grad():
            one(input_ids=ids[:, :1], past_key_values=cache)
        found.append(largest.elements)
    assert found[0] > 3 * cached
    assert found[1] == cached


def test_what_is_saved_and_trained_is_the_stock_model(tmp_path: Path) -> None:
    stock, model = latent_model(), kvfold.absorb(kvfold.absorb(latent_model()))
    model.save_pretrained(tmp_path)
    again = DeepseekV3ForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again.model.layers[0].self_attn) is DeepseekV3Attention
    assert torch.equal(again(input_ids=IDS).logits, stock(input_ids=IDS).logits)
    assert torch.equal(model(input_ids=IDS).logits, stock(input_ids=IDS).logits), (
        "prefill is the stock class's"
    )
    copied = copy.deepcopy(model)
    assert generate(copied) == generate(stock)
    for one in (stock, model):
        one.train()(input_ids=IDS, labels=IDS).loss.backward()
    gradients = [one.model.layers[0].self_attn.kv_b_proj.weight.grad for one in (stock, model)]
    assert torch.equal(gradients[0], gradients[1])
    recorded = model.eval()
    recorded.set_attn_implementation("eager")
    assert len(recorded(input_ids=IDS, output_attentions=True).attentions) == 2


def test_a_fold_of_ours_and_hooks_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = fold_latent(make(tmp_path / "source"), "--kv-budget", "50%", "--container", "stock")
    model = DeepseekV3ForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    expected = generate(model)
    add_hook_to_module(model.model.layers[0].self_attn, ModelHook())
    with counted(monkeypatch) as taken:
        assert generate(kvfold.absorb(model)) == expected
    assert len(taken) == 2 * 11, "both layers, the hooked one too, at each step after the prompt"


def test_what_cannot_be_absorbed_is_refused() -> None:
    with pytest.raises(
        InvalidInput,
        match=r"a Linear has no latent attention.*DeepseekV2ForCausalLM or DeepseekV3ForCausalLM",
    ):
        kvfold.absorb(nn.Linear(2, 2))
    quantised = latent_model()
    attention = quantised.model.layers[1].self_attn
    attention.kv_b_proj = type("Quantised", (nn.Linear,), {})(32, 160)
    with pytest.raises(InvalidInput, match=r"1\.self_attn\.kv_b_proj is Quantised .* without quantisation"):
        kvfold.absorb(quantised)
    assert type(quantised.model.layers[0].self_attn) is DeepseekV3Attention, "nothing is changed by halves"
    attention.__class__ = type("Patched", (DeepseekV3Attention,), {})
    with pytest.raises(InvalidInput, match="is a Patched, which another library changed"):
        kvfold.absorb(quantised)


def _round_in_place(up: nn.Linear) -> None:
    """Store a projection in FP8 without its scale, which only a call of the module takes back."""
    scale = up.weight.abs().max() / 448
    up.weight = nn.Parameter((up.weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
    up.forward = lambda x: nn.functional.linear(x, up.weight.to(x) * scale.to(x))


def test_weights_that_lack_their_scale_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = latent_model(), kvfold.absorb(latent_model())
    for each in (stock, model):
        for layer in each.model.layers:
            _round_in_place(layer.self_attn.kv_b_proj)
    with counted(monkeypatch) as taken:
        assert torch.equal(chunks(model), chunks(stock))
    assert taken == []
    with pytest.raises(InvalidInput, match=r"kv_b_proj is Linear with a float8_e4m3fn Parameter, .* a plain"):
        kvfold.absorb(stock)
