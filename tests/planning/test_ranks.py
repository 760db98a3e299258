"""`kvfold plan --tp N --dcp M`: memory and order by what one rank holds; sources that MLA cannot serve smaller."""

import json
from pathlib import Path

import pytest
from click.testing import Result

from ..support.commands import run_main
from ..support.tiny import make

WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("ranks") / "source", num_hidden_layers=1, **WIDE)


def plan(source: Path, *options: str, code: int | None = None) -> Result:
    return run_main("plan", source, "--context", "64", "--budgets", "50%", *options, code=code)


def test_a_rank_repeats_latents_and_divides_heads(source: Path) -> None:
    """1,024 elements of four heads: at TP 4 a rank holds 256 of them, and all of a latent."""
    result = plan(source, "--tp", "4", "--json", code=0)
    found = json.loads(result.stdout)
    held = {row["label"]: row["rank"]["elements_per_token_per_layer"] for row in found["candidates"]}
    assert found["unchanged"]["rank"]["elements_per_token_per_layer"] == 256
    assert held["GQA-2"] == held["MQA"] == 256
    assert held["MLA 512+64, serving"] == 576
    assert held["MLA 256+64, serving"] == 320
    rows = {row["label"]: row for row in found["candidates"]}
    assert not any(rows[label]["rank"]["saves"] for label in ("GQA-2", "MQA", "MLA 256+64, serving"))
    order = [row["rank"]["saves"] for row in found["candidates"]]
    assert order == sorted(order, reverse=True)  # those that save nothing come last
    assert "GQA is the better one" in result.stderr
    assert rows["MLA 512+64, serving"]["memory"]["cache"] == 64 * 576 * 4


def test_context_parallelism_makes_latents_the_better_target(source: Path) -> None:
    result = plan(source, "--tp", "4", "--dcp", "4", "--json")
    found = json.loads(result.stdout)
    held = {row["label"]: row["rank"] for row in found["candidates"]}
    assert held["MLA 256+64, serving"] == {"elements_per_token_per_layer": 80, "saves": True}
    assert held["MQA"] == {"elements_per_token_per_layer": 64, "saves": True}
    assert held["GQA-2"] == {"elements_per_token_per_layer": 128, "saves": True}
    assert found["candidates"][0]["rank"]["saves"]
    assert "TP 4 with DCP 4" in plan(source, "--tp", "4", "--dcp", "4").output


@pytest.mark.parametrize(
    ("heads", "words"),
    [(4, None), (2, "MLA at 512+64 (576) saves nothing here"), (1, "MLA for serving saves nothing here")],
)
def test_small_caches_are_told(heads: int, words: str | None, tmp_path: Path) -> None:
    settings = {**WIDE, "num_key_value_heads": heads, "num_hidden_layers": 1}
    result = plan(make(tmp_path / "source", **settings))
    assert ("saves nothing here" in result.stderr) == (words is not None), result.output
    assert words is None or words in result.stderr


def test_ranks_that_cannot_be_are_refused(source: Path) -> None:
    assert "--tp 3 does not divide the 4 attention heads" in plan(source, "--tp", "3", code=2).output
