"""Families whose query and key norms stand behind the rotation: what is measured, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.convert.algebra.attention import Attention
from kvfold.convert.algebra.forward import Scoring, attend
from kvfold.convert.families.source import open_source
from kvfold.core.errors import InvalidInput

from ...support.folds import convert
from ...support.tiny import make
from ...support.tokenizers import save_tokenizer

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
# Chunks and steps of the temperature that calibration does not reach, as in real checkpoints.
SETTINGS: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {},
    "llama4_text": {"attention_chunk_size": 64, "floor_scale": 64},
    "nanochat": {},
}


def source_of(directory: Path, kind: str) -> Path:
    source = make(directory / kind, kind, **{**SHAPE, "vocab_size": 260, **SETTINGS[kind]})
    save_tokenizer(source)
    return source


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_fold_is_measured_and_refined(kind: str, tmp_path: Path) -> None:
    """A measured loss shows that kvfold computes the layer, its norms included, as transformers does."""
    source = source_of(tmp_path, kind)
    calibration = ("--calibration", "self", "--sequences", "4", "--length", "24")
    convert(
        source, "--to", "gqa", "--kv-heads", "2", *calibration, "--refine", "5", out=tmp_path / "out", code=0
    )
    layers = json.loads((tmp_path / "out" / "kvfold.json").read_text())["layers"]
    assert [layer["measured"] is not None for layer in layers] == [True, True]
    assert all(0 < layer["measured"]["refined"] < layer["measured"]["folded"] for layer in layers)


@pytest.mark.parametrize("kind", SETTINGS)
def test_mla_is_refused_before_any_work(kind: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, kind)
    for options in (
        ("--rank", "full"),
        ("--kv-budget", "50%", "--rope", "intact"),
        ("--rank", "8", "--dry-run"),
    ):
        text = convert(source, "--to", "mla", *options, out=tmp_path / "out", code=2).output
        assert "it normalises queries and keys after rotation" in text
        assert "use --to gqa" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [kind]


def test_a_gain_that_a_pair_shares_may_stand_on_either_side_of_the_rotation() -> None:
    torch.manual_seed(0)
    gain_H = torch.rand(4, dtype=torch.float64).repeat(2) + 0.5
    ones_1H = torch.ones(1, 8, dtype=torch.float64)
    draws = (torch.randn(4, 8, 12, dtype=torch.float64) for _ in range(3))
    attention = Attention(
        **dict(zip(("q_NHD", "k_KHD", "v_KHD"), draws, strict=True)),
        o_DNH=torch.randn(12, 4, 8, dtype=torch.float64),
        q_norm_NH=ones_1H,
        k_norm_KH=ones_1H,
        scale=1.0,
    )
    in_front = Attention(**{**vars(attention), "q_norm_NH": gain_H[None]})
    input_BTD, table_F = torch.randn(1, 9, 12, dtype=torch.float64), torch.logspace(0, -2, 4).double()
    behind = attend(attention, input_BTD, table_F, Scoring(late_gain_H=gain_H))
    torch.testing.assert_close(attend(in_front, input_BTD, table_F), behind)
    unlike_H = torch.arange(1, 9, dtype=torch.float64)
    other = attend(attention, input_BTD, table_F, Scoring(late_gain_H=unlike_H))
    off = attend(Attention(**{**vars(attention), "q_norm_NH": unlike_H[None]}), input_BTD, table_F) - other
    assert off.abs().max() > 0.01, "of unlike gains the place matters"


def test_llama_4_without_norms_has_none(tmp_path: Path) -> None:
    source = open_source(make(tmp_path / "llama4", "llama4_text", **SHAPE, use_qk_norm=False))
    assert not source.family.normalises
    assert source.attention(0).k_norm_KH is None
    normed = open_source(make(tmp_path / "normed", "llama4_text", **SHAPE))
    assert [normed.attention(layer).k_norm_KH is None for layer in range(2)] == [False, True]
    assert [normed.window(layer) for layer in range(2)] == [9, None]


@pytest.mark.parametrize("is_tuned", [True, False])
def test_llama_4_without_norms_is_refused_for_another_reason(is_tuned: bool, tmp_path: Path) -> None:
    settings = {"use_qk_norm": False, "attn_temperature_tuning": is_tuned}
    source = make(tmp_path / "source", "llama4_text", **{**SHAPE, **settings})
    mla = ("--to", "mla", "--rank", "full", "--calibration", "none")
    for options in (mla, (*mla, "--container", "stock"), (*mla, "--container", "remote")):
        text = convert(source, *options, out=tmp_path / "out", code=2).output
        assert "its class can scale queries by position in layers without rotation" in text
        assert "normalises" not in text
        assert text.strip().endswith("use --to gqa")
    assert not (tmp_path / "out").exists()
    convert(source, "--to", "gqa", "--kv-heads", "4", out=tmp_path / "out", code=0)


def test_an_earlier_latent_fold_of_llama_4_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward pass ends with an error, which the rules say without running it."""
    source = make(tmp_path / "source", "llama4_text", **SHAPE, use_qk_norm=False)
    monkeypatch.setattr("kvfold.convert.decide.form.never_latent", lambda family: None)
    text = convert(
        source, "--to", "mla", "--rank", "full", "--calibration", "none", out=tmp_path / "out", code=3
    ).output
    assert "it is a fold of Llama 4, text" in text


def test_a_stretched_base_is_checked(tmp_path: Path) -> None:
    """Hunyuan's `alpha` is a part of the rotary table, and a damaged one is refused by name."""
    file = make(tmp_path / "hunyuan", "hunyuan_v1_dense", **SHAPE) / "config.json"
    config = json.loads(file.read_text())
    table_F, _ = open_source(file.parent).frequencies()
    base = 100.0 * 50.0 ** (16 / 14)
    torch.testing.assert_close(table_F, base ** -(torch.arange(8).double() / 8), rtol=1e-6, atol=0)
    for alpha, words in (
        (-1.0, "alpha -1.0, where a positive number"),
        (1e300, "alpha 1e.300, where a positive"),
    ):
        config["rope_parameters"]["alpha"] = alpha
        file.write_text(json.dumps(config))
        with pytest.raises(InvalidInput, match=words):
            open_source(file.parent)
