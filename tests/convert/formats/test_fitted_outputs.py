"""Outputs whose latent norm is a real one compute what was folded, in every container and width."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvfold
from kvfold.convert.formats.stock import NORM_WEIGHT
from kvfold.core.errors import InvalidInput

from ...support.folds import convert, failing
from ...support.tiny import make

CALIBRATED = ("--to", "mla", "--sequences", "6", "--length", "48", "--refine", "0")
FITTED = (*CALIBRATED, "--latent-norm", "fitted")
IDS = torch.arange(2 * 24).reshape(2, 24) ** 2 * 7 % 97


def converted(source: Path, out: Path, *options: str) -> Path:
    convert(source, *options, out=out, code=0)
    return out


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=True).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(IDS, use_cache=False).logits.float()
    return found


def norms(directory: Path, ending: str) -> list[Tensor]:
    found = [t for name, t in load_file(directory / "model.safetensors").items() if name.endswith(ending)]
    assert found
    return found


@pytest.mark.parametrize(("family", "options"), [
    ("llama", ("--container", "stock")),
    ("llama", ("--container", "stock", "--q-lora-rank", "full")),
    ("llama", ("--container", "remote")),
    ("llama", ("--container", "remote", "--q-lora-rank", "full")),
    ("qwen2", ("--container", "remote", "--rope", "decoupled", "--q-lora-rank", "full")),
])  # fmt: skip
def test_a_norm_the_latent_suits_is_no_change(tmp_path: Path, family: str, options: tuple[str, ...]) -> None:
    source = make(tmp_path / "source", family)
    sizes = ("--rank", "32", "--rope-dim", "4", *options)
    out = converted(source, tmp_path / "out", *FITTED, *sizes)
    other = () if "remote" in options else ("--latent-norm", "linear")
    linear = converted(source, tmp_path / "linear", *CALIBRATED, *sizes, *other)
    prefixes = ("kv_a", "q_a") if "--q-lora-rank" in options else ("kv_a",)
    ending = "_norm.weight" if "remote" in options else "_layernorm.weight"
    for prefix in prefixes:
        assert all(bool((norm < NORM_WEIGHT / 8).all()) for norm in norms(out, prefix + ending))
        assert all(bool((norm == NORM_WEIGHT).all()) for norm in norms(linear, prefix + ending))
    assert json.loads((out / "kvfold.json").read_text())["latent_norm"] == "fitted"
    wanted, fitted, without = (logits(load(path)) for path in (source, out, linear))
    assert (fitted - without).abs().mean() < 0.05 * (wanted - without).abs().mean() + 1e-4
    half = logits(load(out, torch.float16))
    assert (half - fitted).abs().mean() < 0.01


@pytest.mark.parametrize("container", ["stock", "remote"])
def test_decoding_from_the_cache_reads_normed_latents(tmp_path: Path, container: str) -> None:
    source = make(tmp_path / "source")
    options = ("--kv-budget", "25%", "--q-lora-rank", "20", "--container", container)
    model = load(converted(source, tmp_path / "out", *FITTED, *options))
    if container == "stock":
        model = kvfold.absorb(model)
    with torch.no_grad():
        first = model(IDS[:, :20], use_cache=True)
        rest = [first.logits]
        for at in range(20, 24):
            step = model(IDS[:, at : at + 1], past_key_values=first.past_key_values, use_cache=True)
            rest.append(step.logits)
    torch.testing.assert_close(torch.cat(rest, 1), logits(model), rtol=0, atol=1e-4)


def test_a_fitted_output_is_absorbed_in_float16(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    sizes = ("--kv-budget", "25%", "--container", "stock")
    fitted = converted(source, tmp_path / "fitted", *FITTED, *sizes)
    linear = converted(source, tmp_path / "linear", *CALIBRATED, *sizes, "--latent-norm", "linear")
    half = kvfold.absorb(load(fitted, torch.float16))
    assert (logits(half) - logits(load(fitted))).abs().mean() < 0.01
    with pytest.raises(InvalidInput, match=r"layers\.0\.self_attn has a .* latent.* in bfloat16 or float32"):
        kvfold.absorb(load(linear, torch.float16))


def test_a_fitted_output_for_serving_computes_what_was_folded(tmp_path: Path) -> None:
    """Zeros fill the latent up to 256, and the mean square of the norm is over them too."""
    source = make(tmp_path / "source", hidden_size=64, head_dim=64)
    options = ("--engine", "vllm", "--rank", "64", "--container", "stock", "--sequences", "24")
    found = []
    for norm in ("fitted", "linear"):
        out = converted(source, tmp_path / norm, *CALIBRATED, "--latent-norm", norm, *options)
        config = json.loads((out / "config.json").read_text())
        assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (256, 64)
        assert failing(out, "transformers,vllm") == []
        found.append(logits(load(out)))
    lost = (found[1] - logits(load(source))).abs().mean()
    assert (found[0] - found[1]).abs().mean() < 0.05 * lost + 1e-4


def test_float16_takes_a_fitted_norm(tmp_path: Path) -> None:
    source = make(tmp_path / "source", dtype=torch.bfloat16)
    out = converted(source, tmp_path / "out", *CALIBRATED, "--kv-budget", "25%", "--dtype", "float16")
    tensors = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    record = json.loads((out / "kvfold.json").read_text())
    assert (record["latent_norm"], record["dtype"]) == ("fitted", "float16")
    heads = converted(
        source, tmp_path / "heads", "--to", "mqa", "--calibration", "none", "--dtype", "float16"
    )
    assert {t.dtype for t in load_file(heads / "model.safetensors").values()} == {torch.float16}
