"""Compressed queries in a plan: what it saves, what it should cost, what is refused."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvfold.cli import main
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite

from ...support.commands import run_main
from ...support.folds import WEIGHTS
from ...support.tiny import make


def test_a_plan_says_what_it_saves(tmp_path: Path) -> None:
    """32 columns to 8·(8+8) rows are 4096 weights, and 12·(32+128) = 1920 through 12 numbers."""
    source = make(tmp_path / "source")
    command = ["convert", str(source), "--to", "mla", *WEIGHTS, "--kv-budget", "50%", "--dry-run"]

    def plan(*options: str) -> dict[str, Any]:
        result = run_main(*command, *options, "--json")
        return dict(json.loads(result.stdout))

    without, compressed, whole = plan(), plan("--q-lora-rank", "12"), plan("--q-lora-rank", "full")
    assert compressed["query_parameters"] == [4096, 1920]
    assert without["query_parameters"] is None
    assert compressed["output_bytes"] < without["output_bytes"]
    assert compressed["cache"] == without["cache"]
    assert compressed["attention_of_layer_0"]["model.layers.0.self_attn.q_a_proj.weight"] == [12, 32]
    assert any("this saves nothing" in text for text in whole["notices"])
    assert not any("this saves nothing" in text for text in compressed["notices"])
    shown = CliRunner().invoke(main, [*command, "--q-lora-rank", "12"]).output
    assert "4,096 -> 1,920 parameters (-53%); the cache does not change" in " ".join(shown.split())


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Statistics]:
    source = make(tmp_path_factory.mktemp("studied") / "source", num_key_value_heads=4)
    taken = study(open_source(source), "self", sequences=8, length=32, seed=0)
    assert taken is not None
    return source, taken


@pytest.mark.parametrize(
    "sizes", [{"kv_budget": "50%"}, {"rank": "full"}, {"kv_budget": "50%", "rope": "intact"}]
)
def test_planned_losses_hold(studied: tuple[Path, Statistics], tmp_path: Path, sizes: dict[str, str]) -> None:
    """Every layer's own, less the more is kept; nothing where all is; part of the record."""
    source, taken = studied
    measured = []
    for rank in ("8", "16", "24", "full"):
        asked = {"model": str(source), "to": "mla", "refine": 0, "q_lora_rank": rank, **sizes}
        plan = make_plan(source, fold_request(asked), taken)
        assert all(loss is not None for loss in plan.losses)
        record = rewrite(plan, tmp_path / rank)
        measured.append([layer["measured"]["folded"] for layer in record["layers"]])
        planned = [layer["planned"]["queries"] for layer in record["layers"]]
        assert all(loss > 0 for loss in planned) == (rank != "full")
        if "rope" not in sizes:
            assert plan.predicted == pytest.approx(
                sum(sum(layer["planned"].values()) for layer in record["layers"])
            )
    for more, less in pairwise(measured):
        assert sum(more) > sum(less)
