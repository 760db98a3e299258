"""Families in which only some layers attend: their statistics, their other layers, their cache, their fields."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvfold.convert.algebra.attention import Attention
from kvfold.convert.algebra.forward import attend
from kvfold.convert.algebra.metric import weights_only
from kvfold.convert.algebra.target import GroupedTarget
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.convert.methods.pooling import by_dimension, mean, subspace
from kvfold.core.errors import InvalidInput
from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.run.job import distill
from kvfold.engines.probes.probe import growth
from kvfold.engines.verify import _cache
from kvfold.eval.suites.cache import count, predicted
from kvfold.models.caches import positions_behind
from kvfold.models.causal_lm import load, load_model
from kvfold.models.load_options import LoadOptions

from ...support.documents import write_documents
from ...support.folds import WEIGHTS, convert
from ...support.tiny import make
from ...support.tokenizers import save_tokenizer

KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
DEEP = {**SHAPE, "vocab_size": 260, "num_hidden_layers": 4, "layer_types": KINDS}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make(tmp_path_factory.mktemp("hybrid") / "qwen3_next", "qwen3_next", **DEEP)
    save_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def folds(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folds by statistics, which are taken once."""
    root = tmp_path_factory.mktemp("folds")
    opened = open_source(source)
    tokens = root / "text.safetensors"
    study(opened, "self", sequences=4, length=24, seed=0, save=tokens)
    made = {}
    for name, options in {
        "gqa": ("--to", "gqa", "--kv-heads", "2"),
        "decoupled": ("--to", "mla", "--kv-budget", "50%", "--rope", "decoupled"),
        "intact": ("--to", "mla", "--kv-budget", "50%", "--rope", "intact"),
    }.items():
        convert(source, *options, "--calibration", str(tokens), "--refine", "3", out=root / name, code=0)
        made[name] = root / name
    return made


def test_one_layer_at_a_time_sees_what_the_whole_model_sees(source: Path, tmp_path: Path) -> None:
    """Layers that do not attend pass gradients on, and take no part in the statistics."""
    opened = open_source(source)
    how: dict[str, Any] = {"sequences": 2, "length": 16, "seed": 0, "work": tmp_path}
    whole, layered = (study(opened, "self", layerwise=one, **how) for one in (False, True))
    assert len(whole.layers) == len(layered.layers) == 2
    for ours, theirs in zip(layered.layers, whole.layers, strict=True):
        for name, tensor in vars(theirs).items():
            torch.testing.assert_close(
                getattr(ours, name), tensor, rtol=1e-3, atol=1e-4 * float(tensor.abs().max())
            )


@pytest.mark.parametrize("name", ["gqa", "decoupled", "intact"])
def test_layers_that_attend_are_measured_others_kept(name: str, source: Path, folds: dict[str, Path]) -> None:
    """A measured loss shows that kvfold computes the layer, gate included, as transformers does."""
    record = json.loads((folds[name] / "kvfold.json").read_text())
    assert [layer["measured"] is not None for layer in record["layers"]] == [True, True]
    assert all(0 < layer["measured"]["refined"] <= layer["measured"]["folded"] for layer in record["layers"])
    before, after = (load_file(directory / "model.safetensors") for directory in (source, folds[name]))
    passed = [tensor for tensor in before if "self_attn" not in tensor]
    assert sum("linear_attn" in tensor for tensor in passed) > 10
    for tensor in passed:
        assert torch.equal(after[tensor].view(torch.uint8), before[tensor].view(torch.uint8)), tensor


@pytest.mark.parametrize("name", ["gqa", "decoupled", "intact"])
def test_the_cache_is_counted_in_the_layers_that_attend(name: str, folds: dict[str, Path]) -> None:
    record = json.loads((folds[name] / "kvfold.json").read_text())
    cache = record["cache"]
    assert cache["layers"] == {"linear_attention": 2, "full_attention": 2}
    assert cache["before"]["elements_per_token_per_layer"] == 2 * 4 * 16
    assert cache["after"]["bytes_per_token"] == 2 * 4 * cache["after"]["elements_per_token_per_layer"]
    loaded = load(folds[name], LoadOptions(dtype="float32", device="cpu"))
    size, config = count(loaded), json.loads((folds[name] / "config.json").read_text())
    digits = 3 if name == "intact" else 0  # of positions, once for all layers
    assert size.growing == 2
    assert size.elements_per_token == 2 * cache["after"]["elements_per_token_per_layer"] + digits
    assert predicted(config) == size.elements_per_token_per_layer
    assert size.state_bytes > 0
    with torch.no_grad():
        layers = growth(loaded.model, torch.arange(40)[None])
    assert len(layers) == 2


def test_the_values_of_a_group_are_multiples_dimension_by_dimension() -> None:
    """Then merging them loses nothing, gate or not; an average does lose."""
    torch.manual_seed(0)
    heads, width, hidden = 4, 4, 12
    factor = torch.randn(heads, width, 1, dtype=torch.float64)
    attention = Attention(
        q_NHD=torch.randn(heads, width, hidden, dtype=torch.float64),
        k_KHD=torch.randn(1, width, hidden, dtype=torch.float64).repeat(heads, 1, 1),
        v_KHD=factor * torch.randn(width, hidden, dtype=torch.float64),
        o_DNH=torch.randn(hidden, heads, width, dtype=torch.float64),
        gate_NHD=torch.randn(heads, width, hidden, dtype=torch.float64),
        scale=0.5,
    )
    table_F = torch.tensor([1.0, 0.1], dtype=torch.float64)
    input_BTD = torch.randn(1, 9, hidden, dtype=torch.float64)
    wanted_BTD = attend(attention, input_BTD, table_F)
    for pool, is_exact in ((by_dimension(subspace), True), (by_dimension(mean), True), (mean, False)):
        pooled = pool(attention, GroupedTarget(num_key_value_heads=2), weights_only(attention, 64), table_F)
        off = float((attend(pooled, input_BTD, table_F) - wanted_BTD).abs().max())
        assert (off < 1e-9) == is_exact


# name -> (what config.json says, a part of the sentence)
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown kind": ({"layer_types": ["linear_attention", "fast_attention", *KINDS[2:]]},
                        r"`layer_types` entries must be in \(.*'fast_attention'"),
    "a kind of another family": ({"layer_types": ["moe", *KINDS[1:]]},
                                 "layers.0.linear_attn.A_log, which a Qwen3NextForCausalLM"),
    "too few": ({"layer_types": KINDS[:3]}, r"\(4\) must be equal to the number of `layer_types`"),
    "a number": ({"layer_types": 4}, "Field 'layer_types' with value 4"),
    "numbers": ({"layer_types": [1, 2, 3, 4]}, "Field 'layer_types' with value "),
    "none attends": ({"layer_types": ["linear_attention"] * 4}, "no layer of the kind full_attention"),
    "attention where there is none": ({"layer_types": ["full_attention"] * 4},
                                      "has no model.layers.0.self_attn."),
    "no attention where there is": ({"layer_types": [*KINDS[:3], "linear_attention"]},
                                    "no model.layers.3.linear_attn|model.layers.3.self_attn.*ignores"),
    "an interval of nothing": ({"layer_types": None, "full_attention_interval": 0},
                               "full_attention_interval 0"),
    "biases before a gate": ({"attention_bias": True}, "attention_bias True"),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_fields_without_meaning_are_one_sentence(case: str, source: Path, tmp_path: Path) -> None:
    changes, sentence = FIELDS[case]
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(InvalidInput, match=sentence) as raised:
        open_source(tmp_path)
    assert "\n" not in str(raised.value)


def test_layers_follow_from_each_family_s_own_fields() -> None:
    """Qwen3-Next's interval, Jamba's period, Bamba's and LFM2's numbers, Granite's older names."""
    from kvfold.convert.families.recognition import attending, complete
    from kvfold.convert.families.rows import FAMILIES

    def layers(kind: str, **fields: Any) -> tuple[int, ...]:
        family = FAMILIES[kind]
        whole = complete(family, {"model_type": kind, "num_hidden_layers": 8, **fields})
        return attending(family, whole)

    assert layers("qwen3_next") == (3, 7)
    assert layers("qwen3_next", full_attention_interval=2) == (1, 3, 5, 7)
    assert layers("jamba", attn_layer_period=4, attn_layer_offset=1) == (1, 5)
    assert layers("bamba", attn_layer_indices=[2, 6]) == (2, 6)
    assert layers("lfm2", full_attn_idxs=[0, 5]) == (0, 5)
    assert layers("granitemoehybrid", layer_types=["mamba"] * 7 + ["attention"]) == (7,)
    assert layers("olmo_hybrid", num_hidden_layers=3) == (2,)


def test_mla_of_normed_keys_that_do_not_rotate_is_refused(tmp_path: Path) -> None:
    rope = {"rope_theta": None, "rope_type": "default"}
    source = make(tmp_path / "source", "olmo_hybrid", **SHAPE, rope_parameters=rope)
    text = convert(
        source, "--to", "mla", "--rank", "full", "--calibration", "none", out=tmp_path / "out", code=2
    ).output
    assert "its keys are normalised, and no output format has such keys without rotation" in text
    convert(source, "--to", "gqa", "--kv-heads", "2", *WEIGHTS, out=tmp_path / "gqa", code=0)


def test_verify_compares_the_number_of_layers_that_grow(folds: dict[str, Path]) -> None:
    from kvfold.engines.rules.rule_types import open_written

    record = json.loads((folds["gqa"] / "kvfold.json").read_text())
    written, each = open_written(folds["gqa"]), record["cache"]["after"]["elements_per_token_per_layer"]
    right = [[each / 2, each / 2]] * 2
    assert _cache(right, record, written).passed
    assert "in 2 of 4 layers" in _cache(right, record, written).detail
    assert not _cache(right * 2, record, written).passed


@pytest.mark.parametrize("kind", ["minimax", "bamba", "qwen3_next"])
def test_steps_with_positions_are_a_whole_pass(kind: str, tmp_path: Path) -> None:
    """Without them transformers' MiniMax and Bamba place every new token at the start."""
    make(tmp_path, kind, **SHAPE)
    model = load_model(tmp_path)
    ids, cache, parts = torch.arange(2 * 20).view(2, 20) * 3 % 90, None, []
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        for part in ids.split([17, 1, 1, 1], dim=1):
            step = model(
                input_ids=part, past_key_values=cache, use_cache=True, **positions_behind(model, cache, part)
            )
            cache = step.past_key_values
            parts.append(step.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=0)


def test_a_fold_is_distilled_on_a_stream(source: Path, folds: dict[str, Path], tmp_path: Path) -> None:
    """Packed documents are refused: the other layers carry the end of one into the next."""
    write_documents(tmp_path / "text.jsonl")
    content: dict[str, Any] = {
        "schema": 1, "student": str(folds["gqa"]), "teacher": str(source), "output": str(tmp_path / "out"),
        "data": {"source": str(tmp_path / "text.jsonl"), "seq_len": 32},
        "stages": [{"name": "kl", "tokens": 3840, "lr": 2e-3, "batch_tokens": 192}],
        "log_every": 1, "precision": "fp32", "device": "cpu",
    }  # fmt: skip
    with pytest.raises(InvalidInput, match=r"data\.packing=stream"):
        distill(Recipe.model_validate(content))
    content["data"]["packing"] = "stream"
    result = distill(Recipe.model_validate(content))
    (stage,) = result.stages
    assert stage["last"]["kl"] < 0.95 * stage["first"]["kl"]
    for name, tensor in load_file(source / "model.safetensors").items():
        if "linear_attn" in name:
            assert not torch.equal(load_file(result.output / "model.safetensors")[name], tensor), name
    with torch.no_grad():
        logits = (
            load(result.output, LoadOptions(dtype="float32", device="cpu"))
            .model(torch.arange(40)[None])
            .logits
        )
    assert logits.isfinite().all()
