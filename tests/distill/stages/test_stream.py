"""Alignment of a model larger than memory: the weights of alignment in memory, after any stop."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfold.core.errors import InvalidInput
from kvfold.core.signals import Interrupted
from kvfold.distill.run.job import distill
from kvfold.distill.stages import stream
from kvfold.distill.stages.stream import Streaming
from kvfold.models import layered_model

from ...support.distillation import metrics, weights
from ...support.folds import fold_latent
from ..conftest import MakeRecipe

STAGE: dict[str, Any] = {
    "name": "align", "losses": {"attention_output": 1.0}, "train": "attention", "tokens": 576, "lr": 1e-2,
    "batch_tokens": 192,
    "micro_batch": 4,
}  # fmt: skip
KL = {"name": "kl", "tokens": 192, "lr": 1e-3, "batch_tokens": 192}


@pytest.fixture(scope="module")
def latents(teacher: Path) -> dict[str, Path]:
    """Latent students in float32, so that no rounding of the file hides a difference."""
    options = ("--kv-budget", "50%", "--dtype", "float32", "--container")
    return {
        "stock": fold_latent(teacher, *options, "stock", "--latent-norm", "linear"),
        "remote": fold_latent(teacher, *options, "remote"),
    }


@pytest.mark.parametrize("container", ["stock", "remote"])
@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_the_weights_are_those_of_alignment_in_memory(
    container: str,
    packing: str,
    make_recipe: MakeRecipe,
    latents: dict[str, Path],
    text: Path,
    tmp_path: Path,
) -> None:
    found = {}
    for mode in ("layerwise", "stream"):
        common = {
            "student": str(latents[container]),
            "data": {"source": str(text), "seq_len": 32, "packing": packing},
        }
        result = distill(make_recipe(stages=[{**STAGE, "mode": mode}], output=str(tmp_path / mode), **common))
        found[mode] = (weights(result.output), metrics(result.output), result.stages)
    (ours, lines, stages), (theirs, other_lines, other_stages) = found["stream"], found["layerwise"]
    before = weights(latents[container])
    assert ours.keys() == theirs.keys() == before.keys()
    for name in ours.keys() - {name for name in ours if "kv_a" in name and "norm" in name}:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=1e-6, atol=1e-6 * float(theirs[name].abs().max())
        )
        assert torch.equal(ours[name], before[name]) == ("self_attn" not in name), name
    for mine, their in zip(lines, other_lines, strict=True):
        keys = {"step", "tokens", "attention_output", "align.layer.0", "align.layer.1"}
        assert {key: mine[key] for key in keys} == pytest.approx({key: their[key] for key in keys}, rel=1e-5)
    assert stages[0]["steps"] == other_stages[0]["steps"] == 3
    assert stages[0]["last"]["attention_output"] < stages[0]["first"]["attention_output"]


@pytest.mark.parametrize("container", ["stock", "remote"])
def test_bf16_computes_what_alignment_in_memory_does(
    container: str,
    make_recipe: MakeRecipe,
    latents: dict[str, Path],
    tmp_path: Path,
    fresh_state: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    student = str(latents[container])
    found, states = {}, list[Tensor]()
    read = Streaming.read
    monkeypatch.setattr(Streaming, "read", lambda *given: states.append(read(*given)) or states[-1])
    for precision, mode in (("bf16", "layerwise"), ("bf16", "stream"), ("fp32", "stream")):
        AcceleratorState._reset_state(reset_partial_state=True)
        stages = [{**STAGE, "mode": mode}]
        out = str(tmp_path / f"{precision}-{mode}")
        result = distill(make_recipe(stages=stages, student=student, output=out, precision=precision))
        found[precision, mode] = weights(result.output), metrics(result.output)
    bf16, whole, fp32 = found["bf16", "stream"], found["bf16", "layerwise"], found["fp32", "stream"]
    assert [state.dtype for state in states] == [torch.bfloat16] * 6 + [torch.float32] * 6
    for mine, theirs, exact in zip(bf16[1], whole[1], fp32[1], strict=True):
        assert mine["attention_output"] == pytest.approx(theirs["attention_output"], rel=1e-5)
        assert mine["attention_output"] == pytest.approx(exact["attention_output"], rel=2e-2)
        assert mine["attention_output"] != pytest.approx(exact["attention_output"], rel=1e-5)


def test_one_layer_and_no_end_of_the_model_is_in_memory(
    make_recipe: MakeRecipe, latents: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpu() -> torch.device:
        raise AssertionError("the recipe has device: cpu")

    monkeypatch.setattr(layered_model, "device", gpu)
    most: dict[int, list[int]] = {}
    learn, adds, sides = stream.learn, stream.adds, list[Any]()

    def watch(student: Any, number: int, *rest: Any) -> Any:
        most[number] = [sum(not weight.is_meta for weight in side.model.parameters()) for side in sides]
        return learn(student, number, *rest)

    def keep(*both: Any) -> Any:
        sides.extend(both)
        return adds(*both)

    monkeypatch.setattr(stream, "adds", keep)
    monkeypatch.setattr(stream, "learn", watch)
    distill(make_recipe(stages=[{**STAGE, "mode": "stream"}], student=str(latents["stock"])))
    # A layer has nine weights here, the linearised norm of the latent being the identity by now; one more is
    # the last norm.
    assert most == {0: [10, 10], 1: [10, 10]}


def test_a_run_goes_on_after_the_layers_that_are_done(
    make_recipe: MakeRecipe, latents: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [{**STAGE, "mode": "stream"}, KL]
    recipe = {"stages": stages, "student": str(latents["stock"])}
    whole = distill(make_recipe(**recipe, output=str(tmp_path / "whole")))

    store, stored = Streaming.store, []

    def kill(self: Streaming, number: int, step: int, hidden: Sequence[Tensor]) -> None:
        stored.append((number, step))
        if stored == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
            raise KeyboardInterrupt
        store(self, number, step, hidden)

    monkeypatch.setattr(Streaming, "store", kill)
    with pytest.raises(KeyboardInterrupt):  # in the first layer
        distill(make_recipe(**recipe))
    keep = stream._Layer._keep

    def interrupt(self: Any, *done: Any) -> None:
        keep(self, *done)
        if self.number == 0:
            self.given.run.signals.append(15)

    monkeypatch.setattr(stream._Layer, "_keep", interrupt)
    with pytest.raises(Interrupted, match="stopped in layer 1 of stage align"):
        distill(make_recipe(**recipe))
    work = tmp_path / "out.partial" / "stages" / "align.stream"
    assert {path.name for path in work.iterdir()} == {
        "boundary-00001",
        "layer-00000.safetensors",
        "layer-00000.json",
    }
    monkeypatch.setattr(stream._Layer, "_keep", keep)
    stored.clear()
    result = distill(make_recipe(**recipe))
    assert stored == []  # the second layer of two has nobody to store for
    mine, other = weights(result.output), weights(whole.output)
    assert all(torch.equal(mine[name], other[name]) for name in other)
    assert [line["kl"] for line in metrics(result.output) if "kl" in line] == [
        line["kl"] for line in metrics(whole.output) if "kl" in line
    ]
    assert not (tmp_path / "out.partial").exists()


def test_a_kept_stage_is_a_checkpoint(make_recipe: MakeRecipe, latents: dict[str, Path]) -> None:
    stages = [{**STAGE, "mode": "stream"}, KL]
    result = distill(make_recipe(stages=stages, student=str(latents["stock"]), save={"keep_stages": True}))
    kept = result.output / "stages" / "align"
    model, info = AutoModelForCausalLM.from_pretrained(kept, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model(torch.tensor([[0, 1]]))
    assert {path.name for path in kept.parent.iterdir()} == {"align"}


def test_a_small_disk_is_told(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(InvalidInput, match=r"147,456 bytes, but .* has .*; give the stage fewer tokens"):
        distill(make_recipe(stages=[{**STAGE, "mode": "stream"}]))
