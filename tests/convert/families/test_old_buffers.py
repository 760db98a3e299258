"""Masks, tables and counters that classes of older releases saved, and that no class reads any more."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvfold.checkpoints.directory import Checkpoint
from kvfold.checkpoints.quantised.packed_checkpoint import open_checkpoint
from kvfold.checkpoints.shards import INDEX
from kvfold.engines.verify import verify
from kvfold.models.layered_model import LayeredModel

from ...support.commands import run_main
from ...support.folds import convert
from ...support.old_files import IN_LAYERS, add_old_buffers
from ...support.quantised import FORMATS, quantise
from ...support.tiny import make, same_bytes

FULL = ("--to", "mla", "--rank", "full", "--calibration", "none")
# Fewer heads in the classes that GPT-NeoX and GPT-2 are written in, and in a family's own.
FEWER = {
    "gpt_neox": ("--to", "gqa", "--kv-heads", "2", "--calibration", "none"),
    "gpt2": ("--to", "mqa", "--calibration", "none"),
    "llama": ("--to", "gqa", "--kv-heads", "2", "--calibration", "none"),
}
CASES = [(family, FULL) for family in IN_LAYERS] + list(FEWER.items())


@pytest.mark.usefixtures("warm_probe")
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize(("family", "options"), CASES)
def test_they_are_left_out_whatever_they_hold(
    family: str, options: tuple[str, ...], shard_size: str, tmp_path: Path
) -> None:
    """A fold has the bytes of one of the same weights without them, and at full rank the source's logits."""
    clean, old = (
        make(tmp_path / name / "source", family, shard_size=shard_size, hidden_size=64)
        for name in ("new", "old")
    )
    names = add_old_buffers(old, family)
    for source in (clean, old):
        assert "ignores" not in convert(source, *options, code=0).output
    outputs = clean.with_name("out"), old.with_name("out")
    assert {
        file for file in same_bytes(*outputs) if file.endswith((".safetensors", INDEX, "config.json"))
    } == set()
    assert not names & set(Checkpoint(outputs[1]))
    if options is FULL and shard_size == "5GB":
        report = verify(outputs[1])
        assert report.failures == []
        assert {check.name: check.passed for check in report.checks}["source"] is True


@pytest.mark.parametrize("form", ["gptq", "fp8 tensor"])
def test_quantised_sources_have_them_too(form: str, tmp_path: Path) -> None:
    made = make(tmp_path / "made")
    sources = [quantise(made, tmp_path / name / "source", FORMATS[form]) for name in ("new", "old")]
    add_old_buffers(sources[1], "llama")
    for source in sources:
        convert(source, *FEWER["llama"], code=0)
    one, other = (load_file(source.with_name("out") / "model.safetensors") for source in sources)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_command_reads_such_a_source(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    names = add_old_buffers(source, "llama")
    quantised = tmp_path / "quantised"
    for words in (
        ["plan", str(source)],
        ["verify", str(source), "--lint"],
        ["quantize", str(source), "--scheme", "w8a8", "--out", str(quantised)],
    ):
        run_main(*words)
    assert not names & set(load_file(quantised / "model.safetensors"))


def test_layers_are_read_without_them(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "gpt_neox")
    add_old_buffers(source, "gpt_neox")
    checkpoint, ids = open_checkpoint(source), torch.arange(12)[None]
    layered = LayeredModel(checkpoint, attention=None)
    layered.check_complete()
    with layered.streamed(0) as model, torch.no_grad():
        found = model(input_ids=ids).logits
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=found.dtype)
    torch.testing.assert_close(found, whole(input_ids=ids).logits)


def test_an_index_that_names_buffers_which_are_gone(tmp_path: Path) -> None:
    """A tool wrote the shards anew without them."""
    source = make(tmp_path / "source", shard_size="20KB")
    content = json.loads((source / INDEX).read_text())
    content["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = min(
        content["weight_map"].values()
    )
    (source / INDEX).write_text(json.dumps(content))
    assert convert(source, *FULL).exit_code == 0


def test_a_packed_weight_without_its_scheme_is_named(tmp_path: Path) -> None:
    """It is no buffer: the class reads the weight that it stands for."""
    source = make(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    del tensors[f"{name}.weight"]
    tensors[f"{name}.qweight"] = torch.zeros(4, 48, dtype=torch.int32)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    done = convert(source, *FULL, code=2)
    assert f"model.safetensors holds {name}.qweight as 'I32'; kvfold folds float weights" in done.output
