"""`kvfold engines`: every kind of output has a verdict in every engine, every rule its evidence, and
docs/serve.md holds the same tables."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvfold.cli import main
from kvfold.convert.decide.engine_rules import RULES, lint_written
from kvfold.convert.decide.engines import ENGINES
from kvfold.convert.decide.lint import Written
from kvfold.convert.decide.rules.engine_pairs import HARDWARE, LAYOUTS, PAIRS, UNKNOWN
from kvfold.convert.decide.rules.known_classes import CLASSES
from kvfold.convert.families.recognition import FAMILIES
from kvfold.verification.engine_table import engine_table, markdown, verdict


def test_every_output_has_a_verdict_in_every_engine() -> None:
    assert set(PAIRS) == {(layout, engine) for layout in LAYOUTS for engine in ENGINES}
    assert {row.engine for row in HARDWARE} <= set(ENGINES)
    for layout, engine in PAIRS:
        words = verdict(layout, engine)
        assert words in {"run", "read", "no", UNKNOWN, "saves no cache (run)", "saves no cache (read)"}
        assert (words == UNKNOWN) == (PAIRS[layout, engine] is None)


@pytest.mark.parametrize("engine", ENGINES[2:])  # the rules of the first two also read tensors
def test_an_unconditional_rule_agrees_with_the_verdict(engine: str) -> None:
    """A rule without a condition is found in whatever checkpoint; what is not known is said of each."""
    for layout in LAYOUTS:
        kind = {"stock": "deepseek_v3", "grouped": "llama"}.get(layout, "kvfold")
        written = Written(Path(), {"model_type": kind, "kvfold": {"form": layout}}, {})
        unknown = [found for found in lint_written(written, [engine]) if found.effect == UNKNOWN]
        assert bool(unknown) == (verdict(layout, engine) == UNKNOWN)
        for rule in RULES:
            if engine in rule.engines and layout in rule.layouts and not rule.condition:
                assert rule.found(written)


def test_classes_are_those_of_families() -> None:
    hosts = {"gpt_bigcode"}
    for known in CLASSES.values():
        assert known <= FAMILIES.keys() | hosts


@pytest.mark.parametrize(
    ("engine", "config", "words"),
    [
        ("sglang", {"model_type": "falcon", "new_decoder_architecture": True}, "refuses to load"),
        ("sglang", {"model_type": "smollm3"}, "its transformers backend runs it"),
        ("llama.cpp", {"model_type": "falcon", "bias": True}, "shape of the query's bias"),
        ("llama.cpp", {"model_type": "opt"}, "knows no such class"),
        ("mlx", {"model_type": "falcon"}, "mlx-lm has no such class"),
        (
            "mlx",
            {"model_type": "gemma2", "sliding_window": 9, "max_position_embeddings": 99},
            "a window of 9",
        ),
        ("tensorrt-llm", {"model_type": "olmo2"}, "not known"),
        ("tgi", {"model_type": "llama"}, "not known"),
    ],
)
def test_grouped_outputs(engine: str, config: dict[str, object], words: str) -> None:
    found = lint_written(Written(Path(), config, {}), [engine])
    assert any(words in str(finding) for finding in found)


def test_a_class_that_every_engine_has_breaks_no_rule() -> None:
    known = [engine for engine in ENGINES if PAIRS["grouped", engine] is not None]
    specs: dict[str, object] = {}
    for engine in known[2:]:  # the first two also look for tensors
        assert lint_written(Written(Path(), {"model_type": "llama"}, specs), [engine]) == []  # type: ignore[arg-type]


def test_the_command_prints_what_the_docs_hold() -> None:
    """After a change of a rule: `python -c "from kvfold.verification.engine_table import markdown; ..."`."""
    docs = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    assert markdown() in docs
    result = CliRunner().invoke(main, ["engines", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads(json.dumps(engine_table()))
    assert len(found["pairs"]) == len(PAIRS)
    assert all(rule["evidence"]["proof"] for rule in found["rules"])
    result = CliRunner().invoke(main, ["engines", "--engine", "mlx"])
    assert "Missing lm_head.weight" in result.output
    assert "SGLang" not in result.output


TOKENIZERS = {
    "byte-level": ({"type": "BPE"}, {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}, ""),
    "pieces": ({"type": "BPE"}, {"type": "Metaspace"}, "no byte-level BPE"),
    "unigram": ({"type": "Unigram"}, None, "no byte-level BPE"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_of_a_latent_output_in_llama_cpp(name: str, tmp_path: Path) -> None:
    model, steps, words = TOKENIZERS[name]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": steps}))
    config = {"model_type": "deepseek_v3", "q_lora_rank": 8, "n_routed_experts": 2, "qk_nope_head_dim": 8}
    found = lint_written(Written(tmp_path, config, {}, tokenizer=tmp_path), ["llama.cpp"])
    told = [finding.sentence for finding in found if "tokenizer" in finding.sentence]
    assert bool(told) == bool(words)
    assert all(words in sentence for sentence in told)
