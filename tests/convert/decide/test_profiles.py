"""The serving profiles 512+64 and 256+64: which is taken, what a rank holds, and where nothing is lost."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.convert.algebra.target import Geometry, GroupedTarget, LatentTarget
from kvfold.convert.decide.per_rank import Ranks, rank_elements, rank_notices, source_elements
from kvfold.convert.decide.profile_choice import NARROW_COST, choose_profile
from kvfold.convert.formats.serving_widths import NARROW, PROFILES, SERVING, Profile
from kvfold.core.errors import InvalidInput

from ...support.folds import QUICK, WEIGHTS, convert, failing
from ...support.tiny import make

# A cache of 512: 512+64 saves nothing, 256+64 does. Equal heads have one head's keys and values.
BETWEEN = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
GOOD = {**BETWEEN, "equal_heads": True, "rms_norm_eps": 4e-6, "tie_word_embeddings": True}


@pytest.mark.parametrize("engine", ["vllm,sglang", "mlx", "llama.cpp"])
def test_a_source_between_the_profiles_loses_nothing_at_256(engine: str, tmp_path: Path) -> None:
    """Without a size: 256+64, the only one that saves, with the source's logits in the stock class."""
    source = make(tmp_path / "source", **GOOD)
    exact = ("--latent-norm", "linear")
    text = convert(
        source, "--to", "mla", "--engine", engine, *exact, *WEIGHTS, out=tmp_path / "out", code=0
    ).output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (256, 64)
    assert "cache 512 -> 320" in text
    assert failing(tmp_path / "out", engine) == []
    kernels = [line for line in text.splitlines() if "kernels for 256+64" in line]
    assert len(kernels) == 1
    assert ("Unsupported block size" in kernels[0]) == ("vllm" in engine)
    ids = torch.arange(2 * 300).reshape(2, 300) ** 2 * 7 % 97
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)(ids).logits
            for place in (tmp_path / "out", source)
        )
    assert (ours - theirs).abs().max() < 5e-5 * max(1.0, float(theirs.std()))


@pytest.mark.parametrize(
    ("engine", "is_tied"), [("mlx", False), ("llama.cpp", True), ("llama.cpp,mlx", False)]
)
def test_widths_of_ones_own_where_an_engine_takes_any(engine: str, is_tied: bool, tmp_path: Path) -> None:
    """The budget's widths, on the default table. MLX wants a head of its own."""
    source = make(tmp_path / "source", **GOOD)
    words = ("--to", "mla", "--kv-budget", "50%", "--engine", engine, *QUICK)
    text = convert(source, *words, out=tmp_path / "out", code=0).output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == 256
    assert config["rope_parameters"]["rope_type"] == "default"
    assert config["tie_word_embeddings"] == is_tied
    assert failing(tmp_path / "out", f"{engine},transformers") == []
    assert ("llama.cpp on CUDA has flash attention 576/512" in text) == ("llama.cpp" in engine)
    assert any("not 512+64" in line for line in failing(tmp_path / "out", "vllm"))


@pytest.mark.parametrize(("engine", "options", "cached"), [
    ("llama.cpp", ("--rank", "128"), 256 + 64),
    ("llama.cpp", ("--rank", "128", "--rope-dim", "32"), 128 + 32),
    ("llama.cpp", ("--rank", "300"), 300 + 64),
    ("mlx", ("--rank", "128"), 128 + 64),
    ("llama.cpp,vllm", ("--kv-budget", "50%"), "the least would be 62.5%"),
    ("llama.cpp,vllm", ("--rank", "128", "--rope-dim", "32"), "--rope-dim 32 does not fit"),
    ("mlx", ("--rope-dim", "32"), "gets one where no size is given; add --rank N or --kv-budget SHARE"),
    ("llama.cpp,vllm", ("--rope-dim", "32"), "Error: --rope-dim 32 does not fit the serving profiles"),
])  # fmt: skip
def test_widths_by_engine(engine: str, options: tuple[str, ...], cached: int | str, tmp_path: Path) -> None:
    """A profile where one fits, since all hardware of llama.cpp has a kernel for it; else the user's widths."""
    source = make(tmp_path / "source", **GOOD)
    words = ("--to", "mla", "--engine", engine, *options, "--dry-run", *WEIGHTS)
    text = convert(source, *words, out=tmp_path / "out", code=2 if isinstance(cached, str) else 0).output
    assert (cached if isinstance(cached, str) else f" {cached} elements per token and layer") in text


@pytest.mark.parametrize(("engine", "advice"), [
    ("mlx", "use --to gqa, or --kv-budget SHARE, such as 50%: mlx can run any width"),
    ("llama.cpp", "use --to gqa, or --kv-budget SHARE, such as 50%: llama.cpp can run any width"),
    ("vllm,sglang", "use --to gqa, or --engine transformers, vllm+kvfold, llama.cpp or mlx with --kv-budget"),
])  # fmt: skip
def test_a_source_whose_cache_is_small_gets_one_reason_and_advice_for_its_engine(
    engine: str, advice: str, tmp_path: Path
) -> None:
    source = make(tmp_path / "source")
    text = convert(source, "--to", "mla", "--engine", engine, *WEIGHTS, out=tmp_path / "out", code=2).output
    assert text.count("MLA saves nothing in the serving profiles") == 1
    assert "the source's cache has only 128" in text
    assert advice in text
    assert "--rank" not in text  # which nobody asked for


def predicted(loss: float | None) -> Any:
    """Return a draft of which only the predicted loss matters."""
    return SimpleNamespace(plan=SimpleNamespace(predicted=loss))


@pytest.mark.parametrize(("wide", "narrow", "taken"), [
    (0.1, 0.1 + 0.9 * NARROW_COST, NARROW),
    (0.1, 0.1 + 1.1 * NARROW_COST, SERVING),
    (None, None, SERVING),
    (0.1, None, SERVING),
])  # fmt: skip
def test_a_narrow_profile_that_costs_little(wide: float | None, narrow: float | None, taken: Profile) -> None:
    losses = {SERVING: predicted(wide), NARROW: predicted(narrow)}
    plan, reason = choose_profile(PROFILES, losses.__getitem__)
    assert plan is losses[taken]
    assert f"{taken} was taken" in reason
    other = next(one for one in PROFILES if one is not taken)
    assert f"--rank {other.latent} takes {other}" in reason


def test_a_profile_that_does_not_hold_the_source_is_passed_over() -> None:
    wide = predicted(0.5)

    def plan(profile: Profile) -> Any:
        if profile is NARROW:
            raise InvalidInput("its heads are too wide")
        return wide

    assert choose_profile(PROFILES, plan) == (wide, "")
    with pytest.raises(InvalidInput, match="too wide"):
        choose_profile((NARROW,), plan)


LLAMA_70B = Geometry(hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, head_dim=128)


@pytest.mark.parametrize(("tensor", "context", "source", "latent", "grouped"), [
    (1, 1, 2048, 576, 1024),
    (4, 1, 512, 576, 256),
    (8, 1, 256, 576, 256),
    (8, 8, 256, 72, 128),
    (16, 2, 128, 288, 128),
])  # fmt: skip
def test_what_a_rank_holds(tensor: int, context: int, source: int, latent: int, grouped: int) -> None:
    """Llama-3-70B: at TP 8 GQA-8 holds 256 elements, MLA 576, and 72 with DCP 8."""
    ranks = Ranks(tensor=tensor, context=context)
    ranks.check(LLAMA_70B)
    assert source_elements(LLAMA_70B, ranks) == source
    mla = LatentTarget(kv_lora_rank=512, qk_rope_head_dim=64)
    assert rank_elements(mla, LLAMA_70B, 576, ranks) == latent
    assert rank_elements(GroupedTarget(num_key_value_heads=4), LLAMA_70B, 1024, ranks) == grouped


@pytest.mark.parametrize(
    ("tensor", "context", "words"), [(3, 1, "--tp 3"), (8, 3, "--dcp 3"), (2, 4, "--dcp 4")]
)
def test_ranks_that_cannot_be(tensor: int, context: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Ranks(tensor=tensor, context=context).check(LLAMA_70B)


def test_a_latent_that_ranks_repeat_is_told() -> None:
    mla = LatentTarget(kv_lora_rank=512, qk_rope_head_dim=64)
    (told,) = rank_notices(mla, LLAMA_70B, 576, ("vllm",))
    assert "576 elements" in told
    assert "512 of the source at TP 4" in told
    assert "72 at TP 8 with DCP 8" in told
    assert rank_notices(mla, LLAMA_70B, 576, ("mlx",)) == ()
    assert rank_notices(GroupedTarget(num_key_value_heads=4), LLAMA_70B, 1024, ("vllm",)) == ()
