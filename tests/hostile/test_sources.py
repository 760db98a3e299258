"""Damaged and hostile sources: each is refused in one sentence, with exit code 2 and nothing written."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from kvfold import recipes
from kvfold.checkpoints.shards import INDEX
from kvfold.cli import main

from ..support.tiny import ROPE, make

MLA = ("--to", "mla", "--rank", "24", "--rope-dim", "4", "--calibration", "none")
DEEP = "[" * 100_000
GATE = "model.layers.0.mlp.gate_proj.weight"
Damage = Callable[[Path], object]


def config(**changes: Any) -> Damage:
    """Change fields of config.json."""

    def damage(source: Path) -> None:
        file = source / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def rope(**changes: Any) -> Damage:
    """Change the rope parameters of config.json."""
    return config(rope_parameters={**ROPE["llama3"], **changes})


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the weights."""

    def damage(source: Path) -> None:
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, source / "model.safetensors")

    return damage


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the header of the weights; what it returns, if anything, is the new header's text."""

    def damage(source: Path) -> None:
        file = source / "model.safetensors"
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        rows = json.loads(content[8 : 8 + length])
        changed = change(rows)
        text = changed if isinstance(changed, str) else json.dumps(rows)
        file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + content[8 + length :])

    return damage


def written(name: str, text: str) -> Damage:
    """Write a file."""
    return lambda source: (source / name).write_text(text)


def indexed(text: str) -> Damage:
    """Name the weights as a shard, with an index of this content."""

    def damage(source: Path) -> None:
        (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
        (source / INDEX).write_text(text)

    return damage


def shifted(rows: dict[str, Any]) -> None:
    """Have a tensor overlap the one before it."""
    first, second = sorted((row for row in rows.values() if "shape" in row), key=_begin)[:2]
    size = second["data_offsets"][1] - second["data_offsets"][0]
    begin = first["data_offsets"][1] - 8
    second["data_offsets"] = [begin, begin + size]


def _begin(row: dict[str, Any]) -> int:
    return int(row["data_offsets"][0])


def doubled(rows: dict[str, Any]) -> str:
    return f'{json.dumps(rows)[:-1]}, "{GATE}": {json.dumps(rows[GATE])}}}'


def first_row(**fields: Any) -> Damage:
    return header(lambda rows: rows[GATE].update(fields))


def transposed(tensors: dict[str, torch.Tensor]) -> None:
    tensors[GATE] = tensors[GATE].T.contiguous()


HEADERS: dict[str, tuple[Damage, str]] = {
    "overlap": (header(shifted), "overlaps the tensor before it"),
    "hole": (header(lambda rows: rows.pop(GATE)), "has unused bytes before it"),
    "duplicate": (header(doubled), f"has the key '{GATE}' twice"),
    "negative shape": (first_row(shape=[-48, -32]), "its shape is [-48, -32]"),
    "float shape": (first_row(shape=[48.0, 32]), "its shape is [48.0, 32]"),
    "true shape": (first_row(shape=[True, 1536]), "its shape is [True, 1536]"),
    "shape in words": (first_row(shape="48, 32"), "its shape is '48, 32'"),
    "huge shape": (first_row(shape=[0, 2**61, 2**61]), "of its data_offsets"),
    "no offsets": (first_row(data_offsets=None), "its data_offsets are None"),
    "dtype list": (first_row(dtype=["F32"]), "holds model.layers.0.mlp.gate_proj.weight as ['F32']"),
    "row no object": (header(lambda rows: rows.update({GATE: 7})), "it holds no object"),
    "metadata no object": (header(lambda rows: rows.update(__metadata__=[1])), "has a damaged header"),
    "deep": (header(lambda rows: f'{{"a": {DEEP}'), "levels deep"),
    "list": (header(lambda rows: "[]"), "holds a list"),
    "NaN": (header(lambda rows: '{"a": NaN}'), "NaN"),
}
WEIGHTS: dict[str, tuple[Damage, str]] = {
    "vocabulary": (config(vocab_size=99), "has shape (97, 32), but config.json implies (99, 32)"),
    "wide MLP": (config(intermediate_size=40), "has shape (32, 48), but config.json implies (32, 40)"),
    "transposed": (weights(transposed), f"{GATE} of "),
    "norm": (
        weights(lambda tensors: tensors.update({"model.norm.weight": torch.ones(33)})),
        "model.norm.weight of ",
    ),
    "head": (
        weights(lambda tensors: tensors.update({"lm_head.weight": torch.ones(97, 31)})),
        "lm_head.weight of ",
    ),
    "biases missing": (
        config(model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
        "has no model.layers.0.self_attn.k_proj.bias, which a Qwen2ForCausalLM has",
    ),
    "layers unused": (config(num_hidden_layers=1), "has model.layers.1."),
    "norms of another class": (
        config(model_type="olmo", architectures=["OlmoForCausalLM"]),
        "has model.layers.0.input_layernorm.weight, which a OlmoForCausalLM with this config.json ignores",
    ),
}
FIELDS: dict[str, tuple[Damage, str]] = {
    "padding beyond": (config(pad_token_id=97), "pad_token_id 97, where a token id from 0 to 96"),
    "id huge": (config(eos_token_id=2**31), "eos_token_id 2147483648, where a token id from 0 to 96"),
    "id true": (config(bos_token_id=True), "Field 'bos_token_id' with value True"),
    "id negative": (config(bos_token_id=-5), "bos_token_id -5"),
    "id in a list": (config(eos_token_id=[1, "a"]), "Field 'eos_token_id' with value [1, 'a']"),
    "id no number": (config(pad_token_id=1.5), "Field 'pad_token_id' with value 1.5"),
    "cache in words": (config(use_cache="x"), "Field 'use_cache' expected bool, got str"),
    "layer types": (config(layer_types=7), "layer_types 7, where a list of strings"),
    "too few layer types": (
        config(layer_types=["full_attention"]),
        "must be equal to the number of `layer_types` (1)",
    ),
    "rope type list": (rope(rope_type=["llama3"]), "rope_parameters.rope_type ['llama3']"),
    "rope unknown": (rope(rope_type="spiral"), "spiral"),
    "rope in a list": (config(rope_parameters=[1]), "rope_parameters [1], where an object"),
    "theta infinite": (rope(rope_theta=float("inf")), "rope_theta inf"),
    "theta zero": (rope(rope_theta=0), "rope_theta 0"),
    "theta tiny": (rope(rope_theta=1e-320), "rope parameters that make infinite frequencies"),
    "factor huge": (rope(factor=1e308), "factor 1e+308, where a positive number of at most 1e+30 is needed"),
    "factor tiny": (rope(factor=1e-300), "rope parameters that make infinite frequencies"),
    "factor in words": (rope(factor="8"), "rope_parameters.factor '8'"),
    "factor missing": (config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "factor"),
    "low above high": (
        rope(low_freq_factor=5.0),
        "low_freq_factor 5.0, where a number below high_freq_factor",
    ),
    "part of a head": (rope(partial_rotary_factor=0.5), "partial_rotary_factor 0.5, but LlamaForCausalLM"),
    "rotary width": (config(rotary_dim=4), "4 rotary dimensions per head, but LlamaForCausalLM"),
    "no part of a head": (config(partial_rotary_factor=[0.5]), "partial_rotary_factor [0.5]"),
    "positions": (config(max_position_embeddings=10**30), f"max_position_embeddings {10**30}"),
    "layers": (config(num_hidden_layers=2**31), f"num_hidden_layers {2**31}"),
    "labels": (config(num_labels=10**30), f"num_labels {10**30}"),
    "layers true": (config(num_hidden_layers=True), "num_hidden_layers True"),
    "epsilon": (config(rms_norm_eps=-1), "rms_norm_eps -1"),
    "kind list": (config(model_type=["llama"]), "model_type ['llama'], where a string"),
    "activation": (config(hidden_act="nope"), "cannot be loaded (KeyError)"),
    "deep": (written("config.json", f'{{"a": {DEEP}'), "levels deep"),
    "deep index": (indexed(f'{{"weight_map": {DEEP}'), "levels deep"),
    "index elsewhere": (
        indexed('{"weight_map": {"a": "../source/a.safetensors"}}'),
        "has the shard '../source/a.safetensors' for",
    ),
    "index of lists": (indexed('{"weight_map": {"a": ["b"]}}'), "has the shard ['b'] for"),
    "no index": (lambda source: (source / "model.safetensors").rename(source / "a.safetensors"), "neither"),
    "other weights": (config(transformers_weights="adapter_model.bin"), "transformers_weights"),
    "adapter": (written("adapter_config.json", "{}"), "has an adapter"),
    "generation list": (written("generation_config.json", "[]"), "generation_config.json holds a list"),
    "generation deep": (written("generation_config.json", DEEP), "levels deep"),
}
CASES = {
    f"{name}: {case}": given
    for name, table in {"header": HEADERS, "weights": WEIGHTS, "field": FIELDS}.items()
    for case, given in table.items()
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to copy and damage."""
    return make(tmp_path_factory.mktemp("good") / "source")


def check_refused(result: Result, sentence: str) -> None:
    assert result.exit_code == 2, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.output.splitlines() if not line.startswith("Note: ")]
    assert len(lines) == 1, result.output
    assert lines[0].startswith("Error: ")


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_source_is_refused(good: Path, tmp_path: Path, case: str) -> None:
    damage, sentence = CASES[case]
    source = Path(shutil.copytree(good, tmp_path / "source"))
    damage(source)
    result = CliRunner().invoke(main, ["convert", str(source), *MLA, "--out", str(tmp_path / "out")])
    check_refused(result, sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_query_scale_of_zero_is_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "gemma2")
    config(query_pre_attn_scalar=0)(source)
    result = CliRunner().invoke(
        main, ["convert", str(source), "--to", "mqa", "--calibration", "none", "--dry-run"]
    )
    check_refused(result, "query_pre_attn_scalar 0, where a positive number of at most 1e+30 is needed")


def test_buffers_of_earlier_versions_are_let_through(good: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(good, tmp_path / "source"))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights(lambda tensors: tensors.update({name: torch.ones(4)}))(source)
    result = CliRunner().invoke(main, ["convert", str(source), *MLA, "--dry-run"])
    assert result.exit_code == 0, result.output


def pickled(source: Path) -> None:
    """Have the weights in a pickle that leaves a trace if it is read."""
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Trace(str(source / "trace"))))


class Trace:
    """An object whose pickle makes a directory where it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


EVALUATED: dict[str, tuple[Damage, str]] = {
    "pickle": (pickled, "holds pickled weights"),
    "other weights": (config(transformers_weights="adapter_model.bin"), "transformers_weights"),
    "adapter": (written("adapter_config.json", '{"peft_type": "LORA"}'), "has an adapter"),
    "labels": (config(num_labels=10**30), f"num_labels {10**30}"),
    "experts": (config(num_local_experts=10**9), f"num_local_experts {10**9}"),
    "method": (config(save_pretrained=7), "has save_pretrained, which is the name of a method"),
    "wide": (config(intermediate_size=2**30), "missing or misshapen"),
    "vocabulary": (config(vocab_size=2**30), "missing or misshapen"),
    "deep config": (written("config.json", f'{{"a": {DEEP}'), "levels deep"),
    "layer types": (config(layer_types=7), "cannot be loaded"),
    "tokenizer null": (written("tokenizer.json", "null"), "tokenizer.json holds nothing"),
    "tokenizer list": (written("tokenizer.json", "[]"), "tokenizer.json holds a list"),
    "tokenizer deep": (written("tokenizer.json", DEEP), "levels deep"),
    "tokenizer empty": (written("tokenizer.json", "{}"), "the tokenizer of"),
    "model of no kind": (
        written("tokenizer.json", '{"version": "1.0", "added_tokens": [], "model": {"type": "Nope"}}'),
        "the tokenizer of",
    ),
    "tokenizer class": (written("tokenizer_config.json", '{"tokenizer_class": 7}'), "the tokenizer of"),
    "special tokens": (written("special_tokens_map.json", "[]"), "special_tokens_map.json holds a list"),
    "record without stage": (
        written(
            "kvfold.json", json.dumps({"schema": 1, "source": {"name": "a", "path": "b"}, "parents": []})
        ),
        "stage: Field required",
    ),
    "record without a source's name": (
        written(
            "kvfold.json",
            json.dumps({"schema": 1, "stage": "convert", "source": {"path": "b"}, "parents": []}),
        ),
        "source.name: Field required",
    ),
    "record deep": (written("kvfold.json", DEEP), "levels deep"),
    "record a list": (written("kvfold.json", "[]"), "kvfold.json holds a list"),
}


@pytest.mark.parametrize("case", EVALUATED)
@pytest.mark.parametrize("role", ["model", "teacher"])
def test_an_evaluation_refuses_it(tmp_path: Path, case: str, role: str) -> None:
    damage, sentence = EVALUATED[case]
    if role == "teacher" and case.startswith("record"):
        pytest.skip("a teacher's record is not read")
    demo = Path(recipes.__file__).parent / "demo"
    source = Path(shutil.copytree(demo, tmp_path / "source"))
    damage(source)
    (tmp_path / "text.txt").write_text("a few words of a text " * 40)
    arguments = [str(source)] if role == "model" else [str(demo), "--teacher", str(source)]
    options = ["--text", str(tmp_path / "text.txt"), "--window", "8", "--device", "cpu"]
    result = CliRunner().invoke(main, ["eval", *arguments, *options])
    check_refused(result, sentence)
    assert not (source / "trace").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "text.txt"}


KERNELS: dict[str, Any] = {
    "name": {"attn_implementation": "org/evil"},
    "private name": {"_attn_implementation": "kernels-community/flash-attn2"},
    "internal name": {"_attn_implementation_internal": "org/evil@main:attend"},
    "by part": {"attn_implementation": {"": "org/evil"}},
    "inside": {"text_config": {"_attn_implementation": "org/evil"}},
    "in a list": {"per_layer_config": [{"attn_implementation": "org/evil"}]},
    "experts": {"_experts_implementation": "org/evil"},
    "not installed": {"_attn_implementation": "flash_attention_3"},
    "another file": {"configuration_files": ["config.4.0.0.json"]},
}


@pytest.mark.parametrize("case", KERNELS)
def test_no_kernel_is_downloaded(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """transformers would download and import a kernel that a config.json names, if `kernels` is installed."""
    from transformers import modeling_utils

    def download(*_: Any, **__: Any) -> None:
        (tmp_path / "canary").touch()

    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda *_: True)
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", download)
    source = Path(shutil.copytree(good, tmp_path / "source"))
    (source / "config.4.0.0.json").write_text('{"model_type": "llama", "_attn_implementation": "org/evil"}')
    config(**KERNELS[case])(source)
    recipe = tmp_path / "recipe.yaml"
    given = {"student": str(source), "teacher": str(source), "output": str(tmp_path / "out")}
    recipe.write_text(json.dumps({"schema": 1, **given}))
    for words in (
        ["convert", source, *MLA, "--out", tmp_path / "out"],
        ["eval", source, "--text", "stdlib"],
        ["verify", source],
        ["publish", source, "org/x", "--dry-run"],
        ["distill", recipe],
        ["distill", recipe, "--explain"],
        ["plan", source, "--calibration", "none"],
    ):
        result = CliRunner().invoke(main, [str(word) for word in words])
        assert result.exit_code == 2, (words, result.output)
        assert "Traceback" not in result.output
    check_refused(CliRunner().invoke(main, ["eval", str(source), "--text", "stdlib"]), "; remove the field")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("family", ["gptj", "gpt_neo"])
def test_tables_of_positions_are_bounded(tmp_path: Path, family: str) -> None:
    sizes = (
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]} if family == "gpt_neo" else {}
    )
    source = make(tmp_path / "source", family, **sizes)
    name = "max_position_embeddings" if family == "gpt_neo" else "n_positions"
    positions = 2**18 if family == "gpt_neo" else 2**31 - 1  # gpt_neo's table is a square
    config(**{name: positions, "max_position_embeddings": positions})(source)
    demo = Path(recipes.__file__).parent / "demo"
    shutil.copyfile(demo / "tokenizer.json", source / "tokenizer.json")
    shutil.copyfile(demo / "tokenizer_config.json", source / "tokenizer_config.json")
    check_refused(CliRunner().invoke(main, ["eval", str(source), "--text", "stdlib"]), "computes tables of")
    if family == "gptj":
        words = ["convert", str(source), "--to", "mqa", "--calibration", "none", "--dry-run"]
        check_refused(CliRunner().invoke(main, words), "computes tables of")


def test_weights_that_the_class_ignores_are_kept_and_named(good: Path, tmp_path: Path) -> None:
    source, out = Path(shutil.copytree(good, tmp_path / "source")), tmp_path / "out"
    weights(lambda tensors: tensors.update({"score.weight": torch.ones(3, 32)}))(source)
    result = CliRunner().invoke(main, ["convert", str(source), *MLA, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "1 weights outside its layers that a LlamaForCausalLM ignores, e.g. score.weight" in result.stderr
    assert torch.equal(load_file(out / "model.safetensors")["score.weight"], torch.ones(3, 32))


@pytest.mark.parametrize("value", [None, []])
def test_an_output_names_its_class(good: Path, tmp_path: Path, value: Any) -> None:
    source = Path(shutil.copytree(good, tmp_path / "source"))
    config(architectures=value)(source)
    options = ["--to", "gqa", "--kv-heads", "4", "--calibration", "none", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, ["convert", str(source), *options])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
