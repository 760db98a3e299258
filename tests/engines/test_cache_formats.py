"""Engines' number formats of the cache: each engine's answer for each layout, in `verify` and `engines`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvfold.cli import main
from kvfold.core.cache_dtypes import CACHE_DTYPES
from kvfold.core.errors import InvalidInput
from kvfold.engines.engine_table import engine_table
from kvfold.engines.rules.engine_names import ENGINES
from kvfold.engines.rules.engine_rules import format_findings
from kvfold.engines.rules.output_kinds import CACHE_FORMATS, LAYOUTS, UNKNOWN

from ..support import folds
from ..support.tiny import make


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_engine_has_an_answer_with_its_evidence(layout: str, engine: str) -> None:
    assert format_findings(layout, engine, "bfloat16") == []
    for name in CACHE_DTYPES.keys() - {"bfloat16"}:
        found = format_findings(layout, engine, name)
        rows = [row for row in CACHE_FORMATS if row.engine == engine and layout in row.layouts]
        taking = [row for row in rows if name in row.takes]
        assert found
        if not rows:
            assert [one.effect for one in found] == [UNKNOWN]
        elif not taking:
            assert [one.effect for one in found] == ["refuses to load"]
        else:
            assert [(one.effect, one.evidence) for one in found] == [("note", row.evidence) for row in taking]


def test_rows_name_what_exists() -> None:
    for row in CACHE_FORMATS:
        assert row.engine in ENGINES
        assert set(row.layouts) <= set(LAYOUTS)
        assert set(row.takes) <= CACHE_DTYPES.keys() - {"bfloat16"}
    with pytest.raises(InvalidInput, match="cache dtype 'int3' is not known"):
        format_findings("stock", "vllm", "int3")


def test_vllm_keeps_latents_in_e4m3_on_gpus_alone() -> None:
    (taken,) = format_findings("stock", "vllm", "fp8_e4m3")
    assert "takes fp8_e4m3 on a GPU: --kv-cache-dtype fp8_e4m3" in taken.sentence
    (refused,) = format_findings("stock", "vllm", "int4")
    assert refused.fails
    assert "use fp8_e4m3" in refused.sentence


@pytest.fixture(scope="module")
def fold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = make(tmp_path_factory.mktemp("models") / "source")
    out = source.with_name("fold")
    assert folds.convert(source, *folds.MLA, out=out).exit_code == 0
    return out


@pytest.mark.parametrize(("name", "failing"), [("fp8_e4m3", False), ("int4", True)])
def test_verify_says_it_of_a_checkpoint(fold: Path, name: str, failing: bool) -> None:
    words = ["verify", str(fold), "--lint", "--engine", "sglang", "--cache-dtype", name, "--json"]
    done = CliRunner().invoke(main, words)
    sentences = {one["sentence"]: one["fails"] for one in json.loads(done.stdout)["findings"]}
    about = {sentence: fails for sentence, fails in sentences.items() if name in sentence}
    assert list(about.values()) == [failing], sentences


def test_the_table_of_engines_has_them() -> None:
    rows = engine_table(["vllm"])["cache_formats"]
    assert {row["hardware"] for row in rows} == {"CPU", "GPU"}
    done = CliRunner().invoke(main, ["engines", "--engine", "vllm"])
    assert "Number formats of the cache" in done.output
