"""Key norms in the stock class: queries and keys as linear functions of the layer's input."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvfold.convert.algebra.attention import Attention
from kvfold.convert.algebra.forward import Scoring
from kvfold.convert.methods.key_regression import without_norms
from kvfold.convert.methods.refinement import LayerSample

from ...support.folds import convert
from ...support.tiny import make

SMALL = ("--sequences", "8", "--length", "48", "--refine", "5", "--verify", "lint")


def normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def test_what_is_left_cannot_be_said_by_a_linear_function() -> None:
    """The residual is orthogonal to the inputs, for queries and keys of every head."""
    torch.manual_seed(0)
    q_NHD, k_KHD = torch.randn(4, 8, 16, dtype=torch.float64), torch.randn(2, 8, 16, dtype=torch.float64)
    q_norm_H, k_norm_H = torch.rand(8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    source = Attention(
        q_NHD=q_NHD, k_KHD=k_KHD, v_KHD=k_KHD, o_DNH=torch.randn(16, 4, 8, dtype=torch.float64), scale=1.0,
        q_norm_NH=q_norm_H[None], k_norm_KH=k_norm_H[None],
    )  # fmt: skip
    input_BTD = torch.randn(9, 32, 16)
    sample = LayerSample(
        input_BTD=input_BTD, output_BTD=input_BTD, fisher_DD=torch.eye(16), scoring=Scoring(norm_epsilon=1e-6)
    )
    plain = without_norms(source, sample)
    assert plain.q_norm_NH is None
    assert plain.k_norm_KH is None
    input_XD = input_BTD[sample.used].flatten(0, 1).double()
    for fitted, rows, weight in ((plain.q_NHD, q_NHD, q_norm_H), (plain.k_KHD, k_KHD, k_norm_H)):
        wanted = normed(torch.einsum("xd,nhd->nxh", input_XD, rows), weight)
        left = wanted - torch.einsum("xd,nhd->nxh", input_XD, fitted)
        against = torch.einsum("nxh,xd->nhd", left, input_XD) / len(input_XD)
        assert against.abs().max() < 2e-3 * wanted.abs().max()
        assert left.square().mean() < 0.9 * wanted.square().mean()


def test_the_output_is_the_stock_class_and_says_what_was_done(tmp_path: Path) -> None:
    source, out = make(tmp_path / "source", "qwen3", num_key_value_heads=4), tmp_path / "out"
    options = ("--to", "mla", "--kv-budget", "75%", "--container", "stock")
    assert convert(source, *options, *SMALL, out=out).exit_code == 0
    record = json.loads((out / "kvfold.json").read_text())
    assert any("normalises its queries and keys" in notice for notice in record["notices"])
    assert record["predicted_loss"] > 0
    assert all(layer["measured"]["refined"] <= layer["measured"]["folded"] for layer in record["layers"])
    assert not any("q_norm" in name or "k_norm" in name for name in load_file(out / "model.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(model).__name__ == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(("options", "words"), [
    (("--rank", "full"), "has no norms of queries and keys"),
    (("--kv-budget", "50%", "--calibration", "none"), "by statistics only"),
    (("--kv-budget", "50%", "--rope", "intact"), "cannot hold this source"),
])  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    source = make(tmp_path / "source", "qwen3", num_key_value_heads=4)
    command = ("--to", "mla", "--container", "stock", *options)
    assert re.search(words, convert(source, *command, out=tmp_path / "out", code=2).output)
    assert not (tmp_path / "out").exists()
