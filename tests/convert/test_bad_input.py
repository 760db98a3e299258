"""Every mistake a user can make is one sentence, exit code 2, and nothing written."""

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.checkpoints.shards import INDEX
from kvfold.convert.calibration import study

from ..support.commands import run_main
from ..support.folds import MLA, convert
from ..support.tiny import make

STOCK = (*MLA, "--container", "stock")


def edit_config(source: Path, **changes: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))


def bytes_as(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return a damage of the bytes of the weights."""

    def damage(source: Path) -> None:
        file = source / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return damage


def tensors_as(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Return a damage of the tensors, which are changed in place."""

    def damage(source: Path) -> None:
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})

    return damage


def add_mlp_biases(source: Path) -> None:
    edit_config(source, mlp_bias=True)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if ".mlp." in name]:
        tensors[name.replace(".weight", ".bias")] = torch.zeros(len(tensors[name]))
    save_file(tensors, source / "model.safetensors")


def pickle_only(source: Path) -> None:
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()


def drop(name: str) -> Callable[[Path], None]:
    return tensors_as(lambda tensors: tensors.pop(name))


def config_with(**changes: Any) -> Callable[[Path], None]:
    return lambda source: edit_config(source, **changes)


def remove(name: str) -> Callable[[Path], None]:
    return lambda source: (source / name).unlink()


V_PROJ = "model.layers.1.self_attn.v_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4096\n"
MISTRAL = {"model_type": "mistral", "architectures": None}
NEITHER = "and neither is given"
# Options of a good source, and a part of the sentence.
OPTIONS = [
    ("--to mlaa", "'mlaa' is not one of 'gqa', 'mqa', 'mla'"),
    ("--to gqa --kv-heads 3", "8 key/value heads do not fold into 3; "),
    ("--to gqa --kv-heads 16", "choose from 1, 2, 4, 8"),
    ("--to gqa", f"takes either --kv-heads N or --kv-budget SHARE, {NEITHER}"),
    ("--to mla --rank 125 --rope-dim 4", "ranks from 1 to 123"),
    ("--to mla --rank half", "it should be a whole number or 'full'"),
    ("--to mla --rank ² --engine vllm", "--rank is '²'; it should be a whole number"),
    (f"--to mla --rank {'9' * 5000}", "it should be a whole number or 'full'"),
    ("--to mla --rank 0", "--rank 0 does not fit"),
    ("--to mla", f"takes either --rank N (or --rank full) or --kv-budget SHARE, {NEITHER}"),
    ("--to mla --rank 4 --kv-budget 25%", "or --kv-budget SHARE, not both"),
    ("--to gqa --rank 4", "--rank does not apply to --to gqa"),
    ("--to mqa --kv-heads 2", "--kv-heads does not apply to --to mqa"),
    ("--to mla --rank 9 --rope-dim 3", "choose an even number from 2 to 64"),
    ("--to mla --rank full --rope-dim 4", "leave --rope-dim out"),
    ("--to gqa --kv-budget 5%", "below one key/value head, which takes 16"),
    ("--to mla --kv-budget 1%", "leaves no room for a latent"),
    ("--to mla --kv-budget lots", "write for example 25% or 0.25"),
    ("--to mla --kv-budget 120%", "is not a share of the source's cache"),
    ("--to mla --rank 24 --rope-dim 4 --calibration none --method mean", "choose from subspace"),
    ("--to mla --rank 24 --shard-size many", "it should be a size, for example 500MB or 5GB"),
    ("--to mla --rank 24 --revision main", "--revision main applies to a Hub id"),
    ("--to mla --kv-budget 50% --q-lora-rank 33", "choose a rank from 1 to 32, or --q-lora-rank full, which"),
    ("--to mla --kv-budget 50% --q-lora-rank 0", "--q-lora-rank 0 does not fit"),
    ("--to mla --kv-budget 50% --q-lora-rank half", "it should be a whole number or 'full'"),
    ("--to mla --kv-budget 50% --rope intact --q-lora-rank -1", "it should be a whole number or 'full'"),
    ("--to mla --rank 32 --engine vllm --q-lora-rank x", "--q-lora-rank"),
    ("--to gqa --kv-heads 4 --q-lora-rank 8", "--q-lora-rank does not apply to --to gqa"),
    ("--to mqa --q-lora-rank 8", "--q-lora-rank does not apply to --to mqa"),
    ("--to mla --kv-budget 50% --method svd --q-lora-rank 8", "is taken as published"),
]
# What is done to a good source, options, and a part of the sentence.
DAMAGES: list[tuple[Callable[[Path], None], tuple[str, ...], str]] = [
    (remove("config.json"), MLA, "has no config.json"),
    (lambda source: (source / "config.json").write_text("{"), MLA, "config.json is not JSON"),
    (bytes_as(lambda content: content[:-100]), MLA, "is truncated, damaged or no safetensors file (Error"),
    (bytes_as(lambda content: content + bytes(10)), MLA,
     "is truncated, damaged or no safetensors file (Error"),
    (bytes_as(lambda _: POINTER), MLA, "model.safetensors is a pointer of Git LFS, not the weights"),
    (bytes_as(lambda content: struct.pack("<Q", 20) + b"{ this is no header }" + content), MLA,
     "is truncated, damaged or no safetensors file (Error"),
    (pickle_only, MLA, "save_pretrained("),
    (remove("model.safetensors"), MLA, "has no safetensors weights"),
    (drop(V_PROJ), MLA, f"has no {V_PROJ}"),
    (config_with(num_key_value_heads=4), MLA, "but config.json implies"),
    (config_with(num_attention_heads=None), MLA,
     "cannot read config.json: Field 'num_attention_heads' expected int"),
    (config_with(model_type="mamba"), MLA, "cannot be folded: it has no attention; see `kvfold families`"),
    (config_with(model_type="lama"), MLA,
     "model_type 'lama' is unknown; did you mean 'llama'? Otherwise see `kvfold families`"),
    (config_with(model_type=None), MLA, "config.json has no model_type; see `kvfold families`"),
    (config_with(model_type="bert"), MLA, "it is an encoder, which reads a whole text"),
    (config_with(model_type="kvfold"), MLA, "it is an output of kvfold; fold its source again"),
    (config_with(model_type="deepseek_v32"), MLA, "reads the tokens that an index selects"),
    (config_with(quantization_config={"quant_method": "gptq"}), MLA,
     "has a quantization_config (gptq), but no quantised weight"),
    (config_with(quantization_config={"quant_method": "quip"}), MLA,
     "quantised by 'quip', which kvfold does not read; it reads fp8, mxfp4, compressed-tensors"),
    (config_with(quantization_config="gptq"), MLA,
     "quantization_config 'gptq', where an object with one of the methods fp8"),
    (tensors_as(lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)})), MLA,
     "as 'I8'; kvfold folds float weights"),
    (config_with(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64), STOCK,
     "sliding_window 64 is shorter"),
    (add_mlp_biases, STOCK, "mlp_bias is true"),
    (config_with(**MISTRAL, max_position_embeddings=8192), STOCK, "sliding_window 4096 is shorter"),
    (config_with(text_config={}), MLA, "cannot be loaded"),
    (config_with(architectures=["LlamaForSequenceClassification"]), MLA, "folds causal language models"),
    (drop("model.norm.weight"), MLA, "has no model.norm.weight, which a LlamaForCausalLM has"),
    (drop("model.norm.weight"), MLA, "others, e.g. model."),
    (
        tensors_as(
            lambda tensors: tensors.update({"model._orig_mod.norm.weight": tensors.pop("model.norm.weight")})
        ),
        MLA,
        "it has model._orig_mod.norm.weight instead: save the model without the wrapper that added `_orig_mod`",
    ),
    (drop("lm_head.weight"), ("--to", "mqa", "--calibration", "none"), "has no lm_head.weight"),
    (config_with(num_key_value_heads="four"), MLA, "has num_key_value_heads 'four'"),
    (config_with(rope_parameters="yarn"), MLA, "cannot read config.json"),
    (config_with(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": None}), MLA,
     "rope parameters that make no frequencies"),
    (config_with(partial_rotary_factor=0.5), MLA,
     "partial_rotary_factor 0.5, but LlamaForCausalLM of transformers rotates whole heads"),
    (config_with(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), MLA,
     "rope_type dynamic has no fixed frequency table"),
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to copy and damage."""
    return make(tmp_path_factory.mktemp("good") / "source")


def refused(source: Path, options: tuple[str, ...] | list[str]) -> str:
    """Run a command that is refused, and return what it says."""
    kept = sorted(source.parent.iterdir())
    result = run_main("convert", source, *options, "--out", source.with_name("out"), code=2)
    assert "Traceback" not in result.output
    assert sorted(source.parent.iterdir()) == kept
    return result.output


@pytest.mark.parametrize(("options", "sentence"), OPTIONS)
def test_options_that_do_not_fit_are_one_sentence(good: Path, options: str, sentence: str) -> None:
    assert sentence in " ".join(refused(good, options.split()).split())


@pytest.mark.parametrize(("damage", "options", "sentence"), DAMAGES)
def test_a_damaged_source_is_one_sentence(
    good: Path, tmp_path: Path, damage: Callable[[Path], None], options: tuple[str, ...], sentence: str
) -> None:
    source = Path(shutil.copytree(good, tmp_path / "source"))
    damage(source)
    assert sentence in refused(source, options)


def test_shards_that_disagree_with_their_index(tmp_path: Path) -> None:
    source = make(tmp_path / "source", shard_size="20KB")
    index = json.loads((source / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))

    moved = {**index["weight_map"], "model.norm.weight": files[0]}
    (source / INDEX).write_text(json.dumps({**index, "weight_map": moved}))
    assert "disagrees with its shards about model.norm.weight" in refused(source, MLA)
    (source / INDEX).write_text("{}")
    assert "is damaged: it has no weight_map" in refused(source, MLA)
    outside = {**index["weight_map"], "model.norm.weight": "../secret.safetensors"}
    (source / INDEX).write_text(json.dumps({**index, "weight_map": outside}))
    assert (
        "has the shard '../secret.safetensors' for 'model.norm.weight', where the name of a file"
        in refused(source, MLA)
    )
    (source / INDEX).write_text(json.dumps(index))
    (source / files[1]).unlink()
    assert f"lacks the shard {files[1]}" in refused(source, MLA)
    (source / INDEX).unlink()
    assert "safetensors files but neither model.safetensors nor" in refused(source, MLA)


def test_a_link_to_nowhere_is_one_sentence(tmp_path: Path) -> None:
    """A broken Hub cache: the snapshot's links lead to files that are gone."""
    source = make(tmp_path / "source")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").symlink_to(tmp_path / "gone")
    assert "model.safetensors: No such file" in refused(source, MLA)


def test_other_safetensors_next_to_the_model_are_left_alone(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    save_file({"x": torch.zeros(1)}, source / "adapter_model.safetensors")
    assert convert(source, *MLA).exit_code == 0
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_the_budget_that_a_refusal_names_is_enough(tmp_path: Path) -> None:
    """Rounded up, never down: what the message recommends must work."""
    source = make(tmp_path / "source", num_attention_heads=7, num_key_value_heads=7, hidden_size=28)
    options = ("--to", "gqa", "--calibration", "none", "--kv-budget")
    share = re.search(r"\((\S+%) of the source's cache\)", refused(source, (*options, "1%")))
    assert convert(source, *options, share[1]).exit_code == 0


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    for out, sentence in (
        (tmp_path / "taken", "exists and nothing is overwritten"),
        (tmp_path / ("n" * 250), "File name too long"),
        (tmp_path / "file" / "out", "is not a directory"),
        (source / "inner", "is inside the source"),
        (Path("/proc/out"), "cannot write /proc/out"),
    ):  # fmt: skip
        assert sentence in run_main("convert", source, *MLA, "--out", out, code=2).output


def test_a_place_that_nothing_can_be_written_to_is_refused_before_statistics_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take hours for a large model; neither /proc nor a directory of the user's can become the output."""
    source = make(tmp_path / "source")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").touch()
    free = tmp_path / "free"
    words = [str(source), *MLA, "--calibration", "self"]
    monkeypatch.setattr(study, "whole_model", lambda *_: pytest.fail("statistics were taken"))
    for more, sentence in (
        (("--out", str(tmp_path / "out")),
         "out.partial exists and is not unfinished work of this user's kvfold"),
        (("--out", "/proc/out"), "cannot write /proc/out"),
        (("--out", str(free), "--save-statistics", "/proc/s.safetensors"),
         "cannot write /proc/s.safetensors"),
    ):  # fmt: skip
        assert sentence in run_main("convert", *words, *more, code=2).output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial", "source"]


def test_a_converted_checkpoint_is_not_converted_again(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    assert convert(source, "--to", "mqa", "--calibration", "none").exit_code == 0
    again = convert(tmp_path / "out", "--to", "mqa", out=tmp_path / "again", code=2)
    assert "already folded by kvfold" in again.output


def test_things_that_are_no_model(tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    file.write_text("")
    for model, sentence in (
        (str(file), "is a file; give the directory"),
        ("./nowhere", "is not a directory, and not a Hub id"),
        ("no such model", "is not a directory, and not a Hub id"),
    ):
        assert sentence in run_main("convert", model, *MLA, code=2).output


def test_no_more_slots_than_rotate(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    source = make(tmp_path / "source", "phi3", rope_parameters=rope)
    options = "--to mla --rank 16 --rope-dim 8 --calibration none --dry-run"
    assert "2 dimensions of a head rotate" in refused(source, options.split())
