"""`kvfold verify`: a sound output passes, and each spoilt one is told by the engine that it goes wrong in."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold.cli import main
from kvfold.convert.families.config_fields import former_rope
from kvfold.convert.families.rows import FAMILIES
from kvfold.convert.formats.stock import Stock
from kvfold.engines.rules.engine_names import ENGINES
from kvfold.engines.rules.engine_rules import RULES, lint
from kvfold.engines.verify import verify

from ..support import folds
from ..support.commands import run_main
from ..support.shown_code import ROOT
from ..support.tiny import make

SERVED = {"hidden_size": 48, "head_dim": 128, "rms_norm_eps": 1e-6, "num_hidden_layers": 26,
          "num_attention_heads": 3,
          "num_key_value_heads": 3}  # fmt: skip
OUTPUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "served": (
        SERVED,
        (
            "--to", "mla", "--rank", "512", "--rope-dim", "64", "--container", "stock", "--latent-norm",
            "linear",
        ),
    ),
    "full": ({"num_key_value_heads": 2}, ("--to", "mla", "--rank", "full", "--container", "stock")),
    "remote": ({"num_key_value_heads": 4}, ("--to", "mla", "--kv-budget", "50%", "--container", "remote")),
    "intact": ({"num_key_value_heads": 4}, ("--to", "mla", "--rank", "full", "--rope", "intact")),
    "gqa": ({}, ("--to", "gqa", "--kv-heads", "2")),
}  # fmt: skip
# Every family, and with its norms off where its config.json may say so.
VARIANTS = [(kind, True) for kind in sorted(FAMILIES)] + [
    (kind, False) for kind in sorted(FAMILIES) if FAMILIES[kind].norm_flag is not None
]


def convert(source: Path, out: Path, *options: str) -> None:
    folds.convert(source, *options, *folds.WEIGHTS, out=out, code=0)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify")
    for name, (settings, options) in OUTPUTS.items():
        convert(make(root / f"{name}-source", "llama", **settings), root / name, *options)
    return root


def copied(outputs: Path, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(outputs / name, tmp_path / name))


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def reweigh(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def failing(directory: Path) -> dict[str, str]:
    """The first failing rule of each engine."""
    found = [finding for finding in lint(directory, ENGINES) if finding.fails]
    return {finding.engine: finding.sentence for finding in reversed(found)}


def test_an_output_for_serving_breaks_no_rule(outputs: Path) -> None:
    """512+64 with the default table, an untied head, epsilon 1e-6, and as many layers as llama.cpp wants."""
    assert failing(outputs / "served") == {}


VLLM = ("vllm", "vllm+kvfold")
SPOILS: dict[str, tuple[str, Callable[[Path], None], set[str], str]] = {
    "epsilon": ("served", lambda d: edit(d, rms_norm_eps=1e-5), {*VLLM, "sglang", "llama.cpp", "tgi"},
                "rms_norm_eps"),
    "rope type": ("served", lambda d: edit(d, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}),
                  {*VLLM, "sglang", "llama.cpp", "mlx"}, "llama3"),
    "layout": ("served", lambda d: edit(d, rope_interleave=False), {*VLLM, "llama.cpp", "mlx", "tgi"}, "rope_interleave"),
    "activation": ("served", lambda d: edit(d, hidden_act="gelu"), {*VLLM, "sglang", "llama.cpp", "mlx", "tgi"},
                   "hidden_act"),
    "experts": ("served", lambda d: edit(d, n_routed_experts=None),
                {"transformers", *VLLM, "sglang", "llama.cpp"}, "experts"),
    "groups": ("served", lambda d: edit(d, n_group=2), {"llama.cpp"}, "n_group"),
    "no head": ("served", lambda d: reweigh(d, lambda t: t.pop("lm_head.weight")), {"transformers", *VLLM, "mlx", "tgi"},
                "lm_head"),
    "tied head": ("served", lambda d: (edit(d, tie_word_embeddings=True),
                                       reweigh(d, lambda t: t.pop("lm_head.weight"))),
                  {*VLLM, "mlx", "tgi"}, "tied"),
    "no norm": ("served",
                lambda d: reweigh(d, lambda t: t.pop("model.layers.1.self_attn.kv_a_layernorm.weight")),
                {"transformers", *VLLM}, "kv_a_layernorm"),
    "bias": ("served",
             lambda d: reweigh(d,
                               lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(64)})),
             {*VLLM, "sglang", "llama.cpp", "tgi"}, "o_proj.bias"),
    "half": ("served", lambda d: reweigh(d, lambda t: t.update({k: v.half() for k, v in t.items()})),
             {"transformers", *VLLM}, "float16"),
    "layers": ("served", lambda d: edit(d, num_hidden_layers=25), {"llama.cpp"}, "q_lora_rank"),
    "misshapen": ("gqa", lambda d: edit(d, num_key_value_heads=4), {"transformers", *VLLM}, "has shape"),
    "no code": ("remote", lambda d: (d / "layers_kvfold.py").unlink(), {"transformers", "vllm", "llama.cpp"},
                "layers_kvfold"),
    "no map": ("remote", lambda d: edit(d, auto_map={"AutoConfig": "configuration_kvfold.KvfoldConfig"}),
               {"transformers", "vllm", "llama.cpp"}, "AutoModel"),
    "a gap": ("remote", lambda d: reweigh(d, lambda t: t.pop("model.layers.1.self_attn.kv_b_proj.weight")),
              {"transformers", *VLLM, "llama.cpp"}, "kv_b_proj"),
    "a name": ("intact", lambda d: edit(d, kv_lora_rank=64), {*VLLM, "llama.cpp"}, "kv_lora_rank"),
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_would_go_wrong_is_told(spoil: str, outputs: Path, tmp_path: Path) -> None:
    """By every engine that would go wrong, and by no other."""
    name, change, engines, words = SPOILS[spoil]
    directory = copied(outputs, name, tmp_path)
    before = failing(directory)
    change(directory)
    after = failing(directory)
    assert {
        engine for engine in after if before.get(engine) != after[engine]
    } | before.keys() == engines | before.keys()
    assert any(words in str(finding) for finding in lint(directory, sorted(engines)) if finding.fails)


@pytest.mark.parametrize("name", ["full", "gqa"])
def test_a_copy_that_transformers_saves_gets_its_rotary_fields_again(name: str, tmp_path: Path) -> None:
    """transformers 5 writes the base into rope_parameters alone, where mlx-lm's Llama does not look."""
    convert(make(tmp_path / "source", rope="llama3"), tmp_path / "gqa", *OUTPUTS["gqa"][1])
    wide = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    convert(make(tmp_path / "other", "llama", **wide), tmp_path / "full", *OUTPUTS["full"][1])
    copy = tmp_path / "copy"
    AutoModelForCausalLM.from_pretrained(tmp_path / name).save_pretrained(copy)
    assert not any("rope_parameters" in str(finding) for finding in lint(tmp_path / name, ENGINES))
    found = {one.engine: one for one in lint(copy, ENGINES) if "rope_parameters only" in str(one)}
    assert (found["mlx"].fails, found["transformers"].fails) == (True, False)
    assert all("--restore" in str(one) for one in found.values())
    report = kvfold.verify(copy, engines=["mlx", "transformers"], run=False, restore=True)
    assert not any("rope_parameters" in str(finding) for finding in report.findings)
    ours, theirs = (json.loads((place / "config.json").read_text()) for place in (copy, tmp_path / name))
    for field in ("rope_theta", "rope_scaling"):
        assert ours[field] == theirs[field]


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3"])
def test_a_copy_with_a_table_for_each_kind_of_layer_gets_its_fields_again(kind: str, tmp_path: Path) -> None:
    """Gemma 3 has a field for the base of layers with a window; OLMo 3 has one base, and none is said for two."""
    bases = {"sliding_attention": 2e4, "full_attention": 5e5 if kind == "gemma3_text" else 2e4}
    tables = {layer: {"rope_type": "default", "rope_theta": base} for layer, base in bases.items()}
    copy = make(tmp_path / kind, kind, rope_parameters=tables)
    assert {one.engine for one in lint(copy, ENGINES) if "rope_parameters only" in str(one)} >= {"mlx"}
    kvfold.verify(copy, engines=["mlx"], run=False, restore=True)
    assert not any("rope_parameters only" in str(one) for one in lint(copy, ENGINES))
    config = json.loads((copy / "config.json").read_text())
    assert config["rope_theta"] == bases["full_attention"]
    assert config.get("rope_local_base_freq", 2e4) == 2e4
    assert AutoModelForCausalLM.from_pretrained(copy).config.rope_parameters == tables
    damaged = {"model_type": kind, "rope_parameters": {**tables, "full_attention": [1]}}
    assert former_rope(damaged) == {}  # who reads the table says so
    tables["sliding_attention"]["rope_theta"] = 3e4
    other = make(tmp_path / "other", kind, rope_parameters=tables)
    assert any("only rope_parameters can say" in str(one) for one in lint(other, ["mlx"])) == (
        kind == "olmo3"
    )


def test_a_tokenizer_of_transformers_5_gets_a_class_that_both_releases_load(tmp_path: Path) -> None:
    """Under the former name of the option too; tokens stay."""
    copy = make(tmp_path / "copy", "llama")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "demo")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.save_pretrained(copy)
    before = tokenizer("one <|turn|> two")["input_ids"]
    assert any("transformers 5 saved its tokenizer" in str(one) for one in lint(copy, ["transformers"]))
    run_main("verify", copy, "--lint", "--restore-rope")
    assert not any("saved its tokenizer" in str(one) for one in lint(copy, ["transformers"]))
    config = json.loads((copy / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == ["<|turn|>"]
    assert "token_type_ids" not in config["model_input_names"]
    assert AutoTokenizer.from_pretrained(copy)("one <|turn|> two")["input_ids"] == before


def test_widths(outputs: Path) -> None:
    """vLLM refuses a width without a kernel; an intact latent saves nothing there."""
    assert any("not 512+64" in str(finding) for finding in lint(outputs / "full", ["vllm"]) if finding.fails)
    assert "vllm" not in failing(outputs / "intact")
    notes = [str(finding) for finding in lint(outputs / "intact", ["vllm"])]
    assert any("saves no cache" in note for note in notes)
    assert any("trust_remote_code" in note for note in notes)


def test_every_rule_carries_its_evidence() -> None:
    for rule in RULES:
        assert rule.engines
        assert set(rule.engines) <= set(ENGINES)
        assert all(evidence.proof and evidence.date.startswith("2026-") for evidence in rule.engines.values())


@pytest.mark.parametrize(("kind", "is_normed"), VARIANTS)
def test_no_tensor_of_a_whole_checkpoint_is_missed(kind: str, is_normed: bool, tmp_path: Path) -> None:
    """Of every family, in its own class, with kvfold's attention, and without norms where they can be off."""
    off: dict[str, Any] = {} if is_normed else {str(FAMILIES[kind].norm_flag): False, "attention_bias": True}
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    source = make(tmp_path / "source", kind, **{**shape, **off})
    assert not [finding for finding in lint(source, ["transformers"]) if finding.fails]
    latent = ("--to", "mla", "--rank", "full", "--container", "remote")
    row = FAMILIES[kind]
    options = latent[:-2] if row.latent else ("--to", "mqa") if row.late_norms or row.unlike else latent
    convert(source, tmp_path / "out", *options)
    assert not [finding for finding in lint(tmp_path / "out", ["transformers"]) if finding.fails]


@pytest.mark.parametrize("name", ["remote", "intact"])
def test_a_run_apart_from_kvfold(name: str, outputs: Path) -> None:
    """A lossless fold is exact, another is measured; the live cache is as large as claimed."""
    report = verify(outputs / name)
    assert report.failures == []
    checks = {check.name: check for check in report.checks}
    assert checks.keys() == {"loads", "finite", "cache", "cache size", "weights", "source"}
    assert checks["cache size"].passed
    assert checks["source"].passed is (None if name == "remote" else True)
    assert (report.measured["kl"] < 1e-9) == (name != "remote")
    assert report.measured["source_perplexity"] > 1
    assert report.measured["class"] == "KvfoldForCausalLM"


def test_a_checkpoint_that_is_not_what_it_claims(outputs: Path, tmp_path: Path) -> None:
    """A changed weight, a wrong claim: exit code 3, and each is named."""
    directory = copied(outputs, "full", tmp_path)
    reweigh(directory, lambda tensors: tensors["model.layers.1.self_attn.o_proj.weight"].mul_(1.01))
    record = json.loads((directory / "kvfold.json").read_text())
    record["cache"]["after"]["elements_per_token_per_layer"] += 1
    (directory / "kvfold.json").write_text(json.dumps(record))
    result = CliRunner().invoke(main, ["verify", str(directory), "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 3
    failed = {check["name"] for check in report["checks"] if check["passed"] is False}
    assert failed == {"cache size", "source"}
    assert not report["passed"]


def test_changed_code_is_not_run(outputs: Path, tmp_path: Path) -> None:
    directory = copied(outputs, "remote", tmp_path)
    path, ran = directory / "modeling_kvfold.py", tmp_path / "ran"
    path.write_text(f"open({str(ran)!r}, 'w')\n" + path.read_text())
    assert "was not run" in run_main("verify", directory, code=3).output
    assert not ran.exists()


def test_mistakes_of_the_user(outputs: Path, tmp_path: Path) -> None:
    directory = copied(outputs, "gqa", tmp_path)
    record = json.loads((directory / "kvfold.json").read_text())
    record["source"]["path"] = str(tmp_path / "gone")
    (directory / "kvfold.json").write_text(json.dumps(record))
    for arguments, words in (
        ([str(directory)], "--source"),
        ([str(directory), "--engine", "vlm"], "vllm"),
        ([str(tmp_path)], "config.json"),
    ):
        assert words in run_main("verify", *arguments, code=2).output
    assert CliRunner().invoke(main, ["verify", str(directory), "--lint"]).exit_code == 0


def test_an_engine_that_does_not_run_an_output_is_named_with_the_way_out(outputs: Path) -> None:
    found = run_main("verify", outputs / "full", "--engine", "vllm", "--lint", code=3)
    assert "does not pass for vllm; kvfold convert --engine vllm writes an output that does" in found.output


def test_the_last_step_of_convert(outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that is not whole stops with exit code 3; nothing is checked where nothing shall be."""
    specs = Stock.specs
    monkeypatch.setattr(
        Stock,
        "specs",
        lambda *args: {n: s for n, s in specs(*args).items() if not n.endswith("kv_a_layernorm.weight")},
    )
    monkeypatch.setattr("kvfold.checkpoints.shards.ShardWriter.write", lambda *_: None)
    for choice, code in (("lint", 3), ("none", 0)):
        options = ("--to", "mla", "--rank", "full", *folds.WEIGHTS, "--verify", choice)
        result = folds.convert(outputs / "full-source", *options, out=tmp_path / choice, code=code)
        assert ("does not pass" in result.output) == bool(code)


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every run in a fresh process end as where the system kills it for lack of memory."""
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -KILL $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))


KILLED = "the run was killed, usually by the system for lack of memory"


@pytest.mark.usefixtures("full")
def test_a_fold_is_written_where_its_run_does_not_fit(outputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "a fold"
    options = ("--to", "mla", "--rank", "full", *folds.WEIGHTS, "--verify", "full")
    found = folds.convert(outputs / "full-source", *options, out=out, code=0)
    assert found.stdout.startswith(f"{out}: MLA by ")
    assert (
        f"{out} is written; it was not run, since {KILLED}; check it later with kvfold verify '{out}'"
        in found.stderr
    )
    assert "FAILS" not in found.output


@pytest.mark.usefixtures("full")
def test_each_caller_names_its_own_way_without_a_run(outputs: Path) -> None:
    directory = str(outputs / "gqa")
    rest = f"{KILLED}; end other programs that take memory, or use %s to apply the rules alone"
    found = CliRunner().invoke(main, ["verify", directory])
    assert (found.exit_code, rest % "--lint" in found.stderr) == (2, True)
    found = CliRunner().invoke(main, ["publish", directory, "org/tiny", "--dry-run", "--verify", "full"])
    assert (found.exit_code, rest % "--verify lint" in found.stderr) == (2, True)
    found = CliRunner().invoke(main, ["publish", directory, "org/tiny", "--dry-run"])
    assert (found.exit_code, f"not run against its source: {KILLED}\n" in found.stderr) == (0, True)
    with pytest.raises(kvfold.InvalidInput) as mistake:
        kvfold.verify(directory)
    assert str(mistake.value) == rest % "run=False"
