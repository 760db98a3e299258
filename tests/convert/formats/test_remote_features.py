"""Decoupled latents of sources with key norms: computed from features, in a model that transformers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfold.convert.algebra.forward import attend
from kvfold.convert.cli import main
from kvfold.convert.decide import form
from kvfold.convert.families.source import open_source
from kvfold.convert.layer.fold import fold_attention
from kvfold.convert.methods.slots import slots_of
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

from ...support.tiny import ROPE, make

# As in OLMo 3: the layers that read everything are extended, with another factor on their scores.
YARN = {"sliding_attention": ROPE["default"], "full_attention": ROPE["yarn"]}
IDS = torch.arange(2 * 40).reshape(2, 40) ** 2 * 7 % 97
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "a norm per head": ("qwen3", {"num_key_value_heads": 2}),
    "with biases": ("qwen3", {"num_key_value_heads": 4, "attention_bias": True}),
    "one norm of all heads": ("olmo2", {"num_key_value_heads": 4, "hidden_size": 64}),
    "a norm of its own for each head": ("cohere", {"num_key_value_heads": 4}),
    "the same in modules": ("stablelm", {"num_key_value_heads": 4, "num_attention_heads": 4}),
    "two rotary tables": ("gemma3_text", {"num_key_value_heads": 4}),
    "two tables, one by YaRN": ("olmo3",
                                {"num_key_value_heads": 4, "hidden_size": 64, "rope_parameters": YARN}),
}  # fmt: skip


def fold(source: Path, *options: str) -> Path:
    out = source.with_name("-".join([source.name, *options[1::2]]).replace("%", ""))
    main(
        [str(source), "--to", "mla", "--rope", "decoupled", *options, "--verify", "none", "--out", str(out)],
        standalone_mode=False,
    )
    return out


def loaded(directory: Path) -> Any:
    return KvfoldForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=IDS).logits
    return out


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, settings = SOURCES[request.param]
    return make(tmp_path_factory.mktemp("features") / "source", family, **settings)


def test_full_rank_is_the_source(source: Path) -> None:
    expected = logits(AutoModelForCausalLM.from_pretrained(source).eval())
    for options in ((), ("--q-lora-rank", "full"), ("--rope", "intact")):
        out = fold(source, "--rank", "full", "--calibration", "none", *options)
        torch.testing.assert_close(logits(loaded(out)), expected, atol=5e-6, rtol=0)


def test_the_code_computes_the_definition(source: Path) -> None:
    """Each layer's attention gives what `attend` gives, which also differs from the source's."""
    out = fold(source, "--kv-budget", "50%", "--calibration", "none")
    model = loaded(out)
    asked = {"model": str(source), "to": "mla", "kv_budget": "50%", "rope": "decoupled"}
    plan = make_plan(source, fold_request(asked))
    input_BTD = torch.randn(2, 9, plan.source.geometry.hidden_size)
    tables = model.model.rotary_emb(input_BTD, torch.arange(9)[None])
    for number, layer in enumerate(model.model.layers):
        folded, _ = fold_attention(plan, number)
        slots_S = slots_of(plan.source, plan.bands, number)
        wanted = attend(
            folded.to(torch.float32), input_BTD, slots_S, plan.source.scoring(number).to(torch.float32)
        )
        with torch.no_grad():
            given, _ = layer.self_attn(input_BTD, position_embeddings=tables)
        torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-4)
    expected = logits(AutoModelForCausalLM.from_pretrained(source).eval())
    assert (logits(model) - expected).abs().max() > 1e-3


def test_steps_in_the_latent_are_what_a_whole_pass_gives(source: Path) -> None:
    model = loaded(fold(source, "--kv-budget", "25%", "--calibration", "none"))
    whole = logits(model)
    with torch.no_grad():
        state, parts = None, []
        for part in IDS.split([30, 1, 1, 8], dim=1):
            step = model(input_ids=part, past_key_values=state, use_cache=True)
            state = step.past_key_values
            parts.append(step.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)
    widths = [layer.keys.shape[-1] + layer.values.shape[-1] for layer in state.layers]
    config = model.config
    assert set(widths) == {config.kv_lora_rank + config.qk_rope_head_dim}


def test_layers_of_two_rotary_tables_get_slots_of_their_own(tmp_path: Path) -> None:
    """By statistics: the frequencies of each layer's slots are some of its own table's."""
    source = make(tmp_path / "source", "gemma3_text", num_key_value_heads=4)
    small = ("--sequences", "4", "--length", "32", "--refine", "2")
    out = fold(source, "--kv-budget", "50%", *small)
    config = json.loads((out / "config.json").read_text())
    first, second = config["kvfold"]["frequencies"]
    assert config["kvfold"]["tables"] == [0, 1]
    assert len(first) == len(second) == config["qk_rope_head_dim"] // 2
    opened = open_source(source)
    for layer, slots in enumerate((first, second)):
        table_F, _ = opened.frequencies(layer)
        assert all(torch.isclose(table_F, torch.tensor(slot, dtype=torch.float64)).any() for slot in slots)
    record = json.loads((out / "kvfold.json").read_text())
    assert all(layer["measured"] and layer["planned"] for layer in record["layers"])


@pytest.mark.parametrize("limit", [-1e9, 1e9])
def test_the_form_follows_the_predicted_loss(
    tmp_path: Path, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --rope both forms are planned; a notice says which is taken, and at what cost."""
    monkeypatch.setattr(form, "LIMIT", limit)
    source, out = make(tmp_path / "source", "qwen3", num_key_value_heads=4), tmp_path / "out"
    small = ("--sequences", "4", "--length", "32", "--refine", "2", "--verify", "none")
    main([str(source), "--to", "mla", "--kv-budget", "50%", *small, "--out", str(out)], standalone_mode=False)
    wanted = "decoupled" if limit > 0 else "intact"
    record = json.loads((out / "kvfold.json").read_text())
    assert record["target"]["rope"] == wanted
    assert any(f"rotation is {wanted}: decoupled is predicted" in notice for notice in record["notices"])
    assert all({"slots", "latent"} <= layer["planned"].keys() for layer in record["layers"])
    for layer in record["layers"]:
        assert layer["measured"]["refined"] <= layer["measured"]["folded"]
