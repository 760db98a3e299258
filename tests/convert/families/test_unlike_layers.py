"""Families whose layers are unlike (Gemma 4): widths and counts of heads, keys as values, shared caches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvfold.cli import main
from kvfold.convert.families.source import open_source
from kvfold.core.errors import InvalidInput
from kvfold.engines.verify import verify

from ...support.commands import run_main
from ...support.folds import convert
from ...support.tiny import make, same_bytes
from ...support.tokenizers import save_tokenizer

KINDS = ["sliding_attention", "full_attention"]
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "layer_types": KINDS * 3,
    "vocab_size": 260, "vocab_size_per_layer_input": 260,
}  # fmt: skip
TIED = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
# name -> settings, and the elements that a layer of each kind caches in the source and as two heads
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int, int]]]] = {
    "wide": ({}, {KINDS[0]: (3, 64, 32), KINDS[1]: (3, 128, 64)}),
    "tied": (TIED, {KINDS[0]: (3, 64, 32), KINDS[1]: (3, 64, 32)}),
    "shared": ({"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
               {KINDS[0]: (2, 64, 32), KINDS[1]: (1, 128, 64)}),
    "tied, experts": (
        {**TIED, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
        {KINDS[0]: (3, 64, 32), KINDS[1]: (3, 64, 32)},
    ),
    "tied, shared": ({**TIED, "num_kv_shared_layers": 2}, {KINDS[0]: (2, 64, 32), KINDS[1]: (2, 64, 32)}),
}  # fmt: skip
IDS = torch.arange(2 * 44).reshape(2, 44) ** 2 * 7 % 97
WEIGHTS = ("--calibration", "none")
TEXT = ("--calibration", "self", "--sequences", "6", "--length", "24")


def source_of(directory: Path, name: str, kind: str = "gemma4_text", **settings: Any) -> Path:
    source = make(directory, kind, **{**SHAPE, **VARIANTS[name][0], **settings})
    save_tokenizer(source)
    return source


def fold(source: Path, name: str, *options: str) -> Path:
    out = source.with_name(f"{source.name}-{name}")
    convert(source, *options, out=out, code=0)
    return out


@torch.no_grad()
def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found: torch.Tensor = model(IDS, use_cache=False).logits
    return found


@torch.no_grad()
def stepped(directory: Path) -> tuple[torch.Tensor, list[int]]:
    """Return logits of a prompt and four steps with the cache, and the numbers in it per kept token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    first = model(IDS[:, :40], use_cache=True)
    state, found = first.past_key_values, [first.logits]
    cached = [layer for layer in state.layers if getattr(layer, "keys", None) is not None]
    sizes = [2 * layer.keys[0, :, 0].numel() for layer in cached]
    for token in range(40, 44):
        step = model(IDS[:, token : token + 1], past_key_values=state, use_cache=True)
        state = step.past_key_values
        found.append(step.logits)
    return torch.cat(found, 1), sizes


def turned_copies(source: Path, *, pairs: bool) -> None:
    """Make the key/value heads of each layer copies of its first one, other but for a turn and a factor.

    Keys are turned by signs of pairs; values by any rotation, or, if they are keys (`pairs`), likewise.
    """
    torch.manual_seed(3)
    tensors = load_file(source / "model.safetensors")
    opened = open_source(source)
    for layer in opened.attending:
        own = opened.shape(layer).geometry
        heads, width = own.num_key_value_heads, own.head_dim
        shared = own.num_attention_heads // heads
        readers = [layer, *opened.followers(layer)]
        place = "model.layers.{}.self_attn.{}_proj.weight"
        sign_KH = (torch.randint(0, 2, (heads, width // 2)) * 2.0 - 1).repeat(1, 2)
        tied = opened.keys_are_values(layer)
        assert tied <= pairs
        turn_KHH = torch.diag_embed(sign_KH) if tied else torch.linalg.qr(torch.randn(heads, width, width)).Q
        factor_K11 = torch.rand(heads, 1, 1) + 0.5
        k = tensors[place.format(layer, "k")]
        k.copy_((k.unflatten(0, (heads, -1)) * sign_KH[..., None] * factor_K11).flatten(0, 1))
        if not tied:
            v = tensors[place.format(layer, "v")]
            v.copy_((turn_KHH @ v.unflatten(0, (heads, -1)) * factor_K11).flatten(0, 1))
        for reader in readers:
            q, o = tensors[place.format(reader, "q")], tensors[place.format(reader, "o")]
            rows = q.unflatten(0, (-1, width))
            q.copy_((rows * sign_KH.repeat_interleave(shared, 0)[..., None]).flatten(0, 1))
            columns = o.unflatten(1, (-1, width))
            back = torch.einsum("dnh,ngh->dng", columns, turn_KHH.repeat_interleave(shared, 0))
            o.copy_(back.flatten(1))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", VARIANTS)
def test_as_many_heads_change_nothing(name: str, tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", name)
    out = fold(source, "same", "--to", "gqa", "--kv-heads", "4", *TEXT, "--refine", "3")
    assert torch.equal(logits(out), logits(source))
    before, after = (load_file(place / "model.safetensors") for place in (source, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


@pytest.mark.usefixtures("warm_probe")
@pytest.mark.parametrize("name", VARIANTS)
def test_equal_heads_merge_losslessly_and_each_kind_caches_less(name: str, tmp_path: Path) -> None:
    """Also heads that differ by what the norms hide; generation with the cache equals that without."""
    source = source_of(tmp_path / "source", name, equal_heads=True)
    wanted = logits(source)
    turned_copies(source, pairs="tied" in name)
    change = logits(source) - wanted
    assert change.square().mean().sqrt() < 2e-6
    # At one token of 88, some processors round 20 times as much as at others.
    assert change.abs().max() < 2e-5
    out = fold(source, "half", "--to", "gqa", "--kv-heads", "2", *WEIGHTS)
    torch.testing.assert_close(logits(out), wanted, atol=2e-5, rtol=0)
    steps, sizes = stepped(out)
    torch.testing.assert_close(steps, wanted, atol=5e-5, rtol=0)
    kinds = json.loads((out / "kvfold.json").read_text())["cache"]["kinds"]
    found = {kind: (size["layers"], size["before"], size["after"]) for kind, size in kinds.items()}
    assert found == VARIANTS[name][1]
    assert sorted(sizes) == sorted(each for count, _, each in found.values() for _ in range(count))
    assert name not in {"wide", "tied, shared"} or verify(out).failures == []
    before, after = (load_file(place / "model.safetensors") for place in (source, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before if "self_attn" not in key)
    assert same_bytes(out, fold(source, "again", "--to", "gqa", "--kv-heads", "2", *WEIGHTS)) == []


@pytest.mark.parametrize("name", VARIANTS)
def test_a_fold_is_measured_and_refined(name: str, tmp_path: Path) -> None:
    """A measured loss shows that kvfold computes each layer as transformers does."""
    source = source_of(tmp_path / "source", name, sliding_window=64)
    out = fold(source, "refined", "--to", "gqa", "--kv-heads", "2", *TEXT, "--refine", "6")
    layers = json.loads((out / "kvfold.json").read_text())["layers"]
    measured = [layer["measured"] for layer in layers]
    opened = open_source(source)
    own = set(opened.attending)
    assert [each is not None for each in measured] == [layer in own for layer in opened.folded]
    assert all(0 < each["refined"] < each["folded"] for each in measured if each)
    divergence = (logits(out) - logits(source)).square().mean()
    plain = fold(source, "mean", "--to", "gqa", "--kv-heads", "2", *WEIGHTS, "--method", "mean")
    assert divergence < (logits(plain) - logits(source)).square().mean()


def test_one_head_in_each_kind(tmp_path: Path) -> None:
    """Layers that have fewer heads than others keep at least one; config.json has both counts."""
    source = source_of(tmp_path / "source", "tied", "gemma4_unified_text")
    config = json.loads((source / "config.json").read_text())
    del config["per_layer_config"]
    (source / "config.json").write_text(json.dumps({**config, "global_head_dim": 16, **TIED}))
    out = fold(source, "mqa", "--to", "mqa", *WEIGHTS)
    written = json.loads((out / "config.json").read_text())
    assert (written["num_key_value_heads"], written["num_global_key_value_heads"]) == (1, 1)
    assert set(stepped(out)[1]) == {2 * 8, 2 * 16}


@pytest.mark.parametrize(("change", "options", "words"), [
    ({}, ("--to", "mla", "--rank", "full"), "its layers differ in the width of their heads"),
    ({}, ("--to", "mqa", "--cache-dtype", "fp8_e4m3"), "no weight prepares them"),
    ({}, ("--to", "mqa", *TEXT, "--layerwise"), "whole model in memory"),
    ({"per_layer_config": [1]}, ("--to", "mqa"), "cannot read config.json: 'list' object"),
    ({"per_layer_config": {"9": {"head_dim": 16}}}, ("--to", "mqa"), "in the range [0, 6); got [9]"),
    ({"per_layer_config": {"1": {"sliding_window": 4}}}, ("--to", "mqa"), "kvfold reads num_key_value"),
    ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, ("--to", "mqa"), "must divide"),
    ({"num_kv_shared_layers": 6}, ("--to", "mqa"), "a number from 0 to 5 is needed"),
    ({"num_kv_shared_layers": 5}, ("--to", "mqa"), "no layer below 1 has keys and values of the kind"),
    ({"use_bidirectional_attention": "all"}, ("--to", "mqa"), "kvfold folds Gemma 4, text where it is"),
])  # fmt: skip
def test_what_cannot_be_is_refused(
    change: dict[str, Any], options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    source = source_of(tmp_path / "source", "shared")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    text = convert(source, *options, out=tmp_path / "out", code=2).output
    assert words in text
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_plan_names_the_command_that_shows_one_target(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", "wide")
    assert "`kvfold convert --to gqa --kv-heads N --dry-run` shows" in run_main("plan", source, code=2).output
    shown = run_main("convert", source, "--to", "mqa", "--dry-run", "--json")
    kinds = json.loads(shown.stdout)["cache"]["kinds"]
    assert kinds["full_attention"] == {"layers": 3, "before": 128, "after": 32}
    table = CliRunner().invoke(main, ["convert", str(source), "--to", "mqa", "--dry-run"]).output
    assert "sliding_attention" in table


def test_heads_that_do_not_fold_by_one_factor_are_refused(tmp_path: Path) -> None:
    settings = {"num_attention_heads": 12, "num_key_value_heads": 12, "num_global_key_value_heads": 4}
    source = source_of(tmp_path / "source", "tied", **settings)
    text = convert(source, "--to", "gqa", "--kv-heads", "4", *WEIGHTS, out=tmp_path / "out", code=2).output
    assert "4 key/value heads of some layers do not fold by the same factor as 12 into 4" in text


def test_a_layer_without_cache_needs_its_donor(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", "shared")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.2.self_attn.v_proj.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=r"has no model.layers.2.self_attn.v_proj.weight"):
        open_source(source)
