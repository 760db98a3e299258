"""Caches that are small, or oddly shaped: every budget that leaves a rotary pair and a latent is taken."""

import json
from pathlib import Path
from typing import Any

import pytest

from ...support.folds import convert
from ...support.tiny import make

CALIBRATED = ("--calibration", "self", "--sequences", "2", "--length", "16", "--refine", "0")
WEIGHTS = ("--calibration", "none")


def planned(source: Path, *options: str) -> dict[str, Any]:
    done = convert(source, "--to", "mla", *options, "--dry-run", "--json", code=0)
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


@pytest.mark.parametrize("budget", ["3%", "6.25%", "12.5%", "25%"])
@pytest.mark.parametrize("heads", [1, 4])
def test_statistics_divide_any_budget(heads: int, budget: str, tmp_path: Path) -> None:
    """One head of 32 at 12.5 % is 8 elements, a quarter of its width."""
    source = make(tmp_path / "source", head_dim=64, num_key_value_heads=heads)
    target = planned(source, "--kv-budget", budget, *CALIBRATED)["target"]
    elements = int(2 * heads * 64 * float(budget[:-1]) / 100)
    assert target["kv_lora_rank"] + target["qk_rope_head_dim"] == elements
    assert min(target["kv_lora_rank"], target["qk_rope_head_dim"]) > 0


@pytest.mark.parametrize("head_dim", [20, 36, 12])
@pytest.mark.parametrize("budget", ["5%", "12.5%", "45%"])
def test_heads_that_four_does_not_divide_well(head_dim: int, budget: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", head_dim=head_dim, num_key_value_heads=4)
    target = planned(source, "--kv-budget", budget, *WEIGHTS)["target"]
    assert target["qk_rope_head_dim"] % 2 == 0
    assert target["qk_rope_head_dim"] <= max(2, 4 * 2 * head_dim * float(budget[:-1]) / 200)


@pytest.mark.parametrize("options", [WEIGHTS, (*CALIBRATED, "--slots", "uniform")])
def test_a_latent_that_holds_everything_is_not_made_wider(options: tuple[str, ...], tmp_path: Path) -> None:
    # 128 elements of 32 inputs.
    source = make(tmp_path / "source", num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    plan = planned(source, "--kv-budget", "75%", *options)
    assert plan["target"]["kv_lora_rank"] == 32
    assert plan["cache"]["ratio"] < 0.5


def test_a_latent_of_normed_keys_may_be_wider_than_what_it_is_made_of(tmp_path: Path) -> None:
    # 256 of 32 inputs.
    source = make(tmp_path / "source", "qwen3", num_attention_heads=4, num_key_value_heads=4, head_dim=32)
    assert planned(source, "--kv-budget", "95%", *WEIGHTS)["target"]["kv_lora_rank"] == 243
