"""A quantised student and teacher: what a stage does not train keeps its bytes."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvfold.checkpoints.record import describe, write_record
from kvfold.distill.run.job import distill
from kvfold.models.causal_lm import load
from kvfold.models.load_options import LoadOptions

from ...support.distillation import same_bits, weights
from ...support.quantised import FORMATS, quantise
from ..conftest import MakeRecipe


@pytest.fixture(scope="module")
def quantised(student: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student with its MLP in FP8, and the teacher quantised whole, each next to its twin."""
    place = tmp_path_factory.mktemp("quantised")
    form = FORMATS["fp8 blocks"]
    quantise(teacher, place / "teacher", form)
    mlp_only = type(form)(form.encode, form.config, form.skipped, only=r"mlp\.\w+\.weight$")
    quantise(student, place / "student", mlp_only)
    for name in ("student", "student-twin"):
        source = place / name.replace("student", "teacher")
        content = {"schema": 1, "stage": "convert", "source": describe(source, None), "parents": []}
        write_record(place / name, content)
    return place


def pair(place: Path, twin: str = "") -> dict[str, str]:
    return {"student": str(place / f"student{twin}"), "teacher": str(place / f"teacher{twin}")}


@pytest.mark.parametrize("mode", ["end_to_end", "layerwise", "stream"])
def test_attention_is_trained_like_the_twins_and_the_rest_keeps_its_bytes(
    mode: str, quantised: Path, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    how = {} if mode == "end_to_end" else {"mode": mode, "losses": {"attention_output": 1.0}}
    runs = {
        twin: distill(
            make_recipe(**pair(quantised, twin), train="attention", output=str(tmp_path / f"o{twin}"), **how)
        )
        for twin in ("", "-twin")
    }
    sentence = (
        f"{quantised / 'student'} has quantised weights; those that are trained are written in bfloat16"
    )
    assert [sentence in run.notices for run in runs.values()] == [True, False]
    ours, its = (load_file(run.output / "model.safetensors") for run in runs.values())
    start = load_file(quantised / "student" / "model.safetensors")
    assert ours.keys() == start.keys()
    trained = [name for name in its if "self_attn" in name]
    assert any(not torch.equal(ours[name], start[name]) for name in trained)
    for name in trained:
        assert torch.equal(ours[name], its[name]), name
    for name in start.keys() - set(trained):
        assert torch.equal(ours[name].view(torch.uint8), start[name].view(torch.uint8)), name
    config = json.loads((runs[""].output / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize("mode", ["layerwise", "stream"])
def test_aligned_attention_is_no_longer_named_quantised(
    mode: str, quantised: Path, student: Path, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """The whole student is in NVFP4; what alignment changed is bfloat16, and both lists say so."""
    start = tmp_path / "start"
    quantise(student, start, FORMATS["modelopt nvfp4"])
    write_record(
        start,
        {"schema": 1, "stage": "convert", "source": describe(quantised / "teacher", None), "parents": []},
    )
    run = distill(
        make_recipe(
            student=str(start),
            teacher=str(quantised / "teacher"),
            train="attention",
            mode=mode,
            losses={"attention_output": 1.0},
            output=str(tmp_path / "out"),
        )
    )
    written, before = load_file(run.output / "model.safetensors"), load_file(start / "model.safetensors")
    projections = [name for name in before if re.search(r"self_attn\.\w+\.weight$", name)]
    assert projections
    for name in projections:
        assert (written[name].dtype, before[name].dtype) == (torch.bfloat16, torch.uint8), name
    config = json.loads((run.output / "config.json").read_text())["quantization_config"]
    content = json.loads((run.output / "hf_quant_config.json").read_text())["quantization"]
    for listed in (config["ignore"], content["exclude_modules"]):
        assert {name.removesuffix(".weight") for name in projections} <= set(listed)
    assert torch.isfinite(load(run.output, LoadOptions()).model(torch.arange(4)[None]).logits).all()


def test_trained_weights_are_not_quantised(quantised: Path, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    run = distill(make_recipe(**pair(quantised), train="all", output=str(tmp_path / "all")))
    written = weights(run.output)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((run.output / "config.json").read_text())
    assert not same_bits(run.output, quantised / "student")
