"""`kvfold engines`: every kind of output has a verdict in every engine, every rule its evidence, and plans,
`kvfold verify`, docs/engines.md and README.md say the same."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvfold.cli import main
from kvfold.convert.decide.engine_choice import unfit
from kvfold.convert.families.rows import FAMILIES
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.engines.engine_table import engine_table, markdown, runs_table, verdict
from kvfold.engines.rules.engine_names import ENGINES
from kvfold.engines.rules.engine_rules import RULES, lint, lint_written
from kvfold.engines.rules.evidence import CLASSES
from kvfold.engines.rules.output_kinds import HARDWARE, LAYOUTS, OUTPUTS, PAIRS, UNKNOWN, takes_any_width
from kvfold.engines.rules.rule_types import FAILING, Written, open_written

from ..support.commands import run_main
from ..support.folds import LINEAR, WEIGHTS, WIDE, attempt, convert
from ..support.tiny import make


def test_every_output_has_a_verdict_in_every_engine() -> None:
    assert set(PAIRS) == {(output, engine) for output in OUTPUTS for engine in ENGINES}
    assert {row.engine for row in HARDWARE} <= set(ENGINES)
    assert {output.layout for output in OUTPUTS.values()} == set(LAYOUTS)
    for output, engine in PAIRS:
        words = verdict(output, engine)
        assert words in {"run", "read", "no", UNKNOWN, "saves no cache (run)", "saves no cache (read)"}
        assert (words == UNKNOWN) == (PAIRS[output, engine] is None)


@pytest.mark.parametrize("engine", ENGINES[3:])  # the rules of the first three also read tensors
def test_an_unconditional_rule_agrees_with_the_verdict(engine: str) -> None:
    """A rule without a condition is found in whatever checkpoint; what is not known is said of each."""
    for key, (_, layout, (latent, rope)) in OUTPUTS.items():
        kind = {"stock": "deepseek_v3", "grouped": "llama"}.get(layout, "kvfold")
        widths = {"kv_lora_rank": latent, "qk_rope_head_dim": rope}
        written = Written(Path(), {"model_type": kind, "kvfold": {"form": layout}, **widths}, {})
        assert written.output == key
        unknown = [found for found in lint_written(written, [engine]) if found.effect == UNKNOWN]
        assert bool(unknown) == (verdict(key, engine) == UNKNOWN)
        for rule in RULES:
            if engine in rule.engines and layout in rule.layouts and not rule.condition:
                assert rule.found(written)


def test_engines_with_a_kernel_for_any_width() -> None:
    assert list(filter(takes_any_width, ENGINES)) == ["transformers", "mlx"]
    somewhere = [engine for engine in ENGINES if takes_any_width(engine, everywhere=False)]
    assert somewhere == ["transformers", "vllm+kvfold", "llama.cpp", "mlx"]


SIZES = {"512+64": ("--rank", "512"), "256+64": ("--rank", "256"), "other widths": ("--kv-budget", "6.25%")}
GRID = {
    **{f"stock {name}": ("--engine", "llama.cpp,vllm", "--container", "stock", *LINEAR, *SIZES[name])
       for name in ("512+64", "256+64")},
    "stock other widths": ("--engine", "mlx", *SIZES["other widths"]),
    "decoupled other widths": ("--container", "remote", "--rope", "decoupled", *SIZES["other widths"]),
    **{f"decoupled {name}": ("--engine", "vllm", "--container", "remote", *SIZES[name])
       for name in ("512+64", "256+64")},
    "intact": ("--container", "remote", "--rope", "intact", *SIZES["other widths"]),
}  # fmt: skip
# Of an output in other widths for MLX, which wants no compressed queries: llama.cpp wants them.
BY_ANOTHER_RULE = {("stock other widths", "llama.cpp")}


@pytest.mark.parametrize("kind", GRID)
def test_plans_files_and_the_table_agree(kind: str, tmp_path: Path) -> None:
    """The table says `no` exactly of outputs that the plan and the written files are refused for."""
    source = make(tmp_path / "source", **WIDE)
    options = ("--to", "mla", *WEIGHTS, *GRID[kind])
    assert attempt(source, tmp_path / "out", *options)[0] == 0
    assert open_written(tmp_path / "out").output == kind
    asked = dict(zip(options[::2], options[1::2], strict=True))
    named = {name.removeprefix("--").replace("-", "_"): value for name, value in asked.items()}
    engines = named.pop("engine", None)
    request = fold_request({"model": str(source), **named, **({"engines": engines} if engines else {})})
    planned = unfit(make_plan(source, request), ENGINES)
    for engine in ENGINES:
        written = lint(tmp_path / "out", [engine])
        refused = {one.effect for one in written if one.effect in (*FAILING, "saves no cache", UNKNOWN)}
        assert {finding.effect for finding in planned[engine]} == refused
        if (kind, engine) not in BY_ANOTHER_RULE:
            words = verdict(kind, engine)
            assert (words not in ("run", "read")) == bool(refused), (engine, words, refused)
            assert (words == "no") == any(effect in FAILING for effect in refused)


def test_a_fold_for_no_engine_says_which_engines_run_it(tmp_path: Path) -> None:
    source = make(tmp_path / "source", **WIDE)
    text = convert(
        source, "--to", "mla", "--kv-budget", "6.25%", "--slots", "uniform", "--rope", "decoupled",
        "--container", "stock", *WEIGHTS, out=tmp_path / "out", code=0,
    ).output  # fmt: skip
    told = next(line for line in text.splitlines() if "load the output in" in line)
    running, others = told.partition("load the output in ")[2].split("; others would not run it right: ")
    assert others.endswith("; for one of them, fold to GQA or name it with --engine")
    for engine in ENGINES:
        findings = lint(tmp_path / "out", [engine])
        fits = all(one.effect == "note" for one in findings)
        assert (engine in running.split(", ")) == fits
        assert fits or engine in others


def test_classes_are_those_of_families() -> None:
    hosts = {"gpt_bigcode"}
    for known in CLASSES.values():
        assert known <= FAMILIES.keys() | hosts


@pytest.mark.parametrize(("engine", "config", "words"), [
    ("sglang", {"model_type": "falcon", "new_decoder_architecture": True}, "refuses to load"),
    ("sglang", {"model_type": "smollm3"}, "its transformers backend runs it"),
    ("sglang", {"model_type": "gemma2", "hidden_activation": "gelu"}, "has no hidden_act"),
    ("sglang", {"model_type": "mixtral", "head_dim": 64, "num_attention_heads": 8, "hidden_size": 64},
     "its head_dim is 64, not 8"),
    ("sglang", {"model_type": "mistral", "sliding_window": 9, "max_position_embeddings": 99},
     "a window of 9"),
    ("llama.cpp", {"model_type": "falcon", "bias": True}, "shape of the query's bias"),
    ("llama.cpp", {"model_type": "opt"}, "knows no such class"),
    ("mlx", {"model_type": "falcon"}, "mlx-lm has no such class"),
    ("mlx", {"model_type": "gemma2", "sliding_window": 9, "max_position_embeddings": 99}, "a window of 9"),
    ("tensorrt-llm", {"model_type": "olmo2"}, "not known"),
    ("tgi", {"model_type": "llama"}, "not known"),
])  # fmt: skip
def test_grouped_outputs(engine: str, config: dict[str, object], words: str) -> None:
    found = lint_written(Written(Path(), config, {}), [engine])
    assert any(words in str(finding) for finding in found)


def test_a_class_that_every_engine_has_breaks_no_rule() -> None:
    known = [engine for engine in ENGINES if PAIRS["grouped", engine] is not None]
    specs: dict[str, object] = {}
    for engine in known[3:]:  # the first three also look for tensors
        assert lint_written(Written(Path(), {"model_type": "llama"}, specs), [engine]) == []  # type: ignore[arg-type]


def test_the_command_prints_what_the_docs_hold() -> None:
    """After a change of a rule: `python -c "from kvfold.engines.engine_table import markdown; ..."`."""
    docs = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    assert markdown() in docs
    assert runs_table() in docs
    assert runs_table() in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    result = run_main("engines", "--json")
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
