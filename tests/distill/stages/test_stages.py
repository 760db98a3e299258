"""The weights that a stage trains, the modes of its layers, and its output."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from kvfold.distill.run.job import distill

from ...support.distillation import interrupt, metrics, same_bits, weights
from ...support.folds import fold_latent
from ..conftest import MakeRecipe

LORA = {"train": "lora", "lora": {"rank": 4, "alpha": 8}}


@pytest.mark.parametrize("train", ["attention", "attention+norms"])
def test_what_is_named_alone_is_trained(make_recipe: MakeRecipe, student: Path, train: str) -> None:
    before, after = weights(student), weights(distill(make_recipe(train=train)).output)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        name for name in before if "self_attn" in name or ("norm" in name and "norms" in train)
    }


def test_adapters_are_merged_into_an_ordinary_checkpoint(make_recipe: MakeRecipe, student: Path) -> None:
    pytest.importorskip("peft")
    result = distill(make_recipe(**LORA))
    (stage,) = result.stages
    assert stage["last"]["kl"] < 0.9 * stage["first"]["kl"]
    before, after = weights(student), weights(result.output)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "self_attn" in name}


def test_an_adapters_change_has_its_rank(make_recipe: MakeRecipe, teacher: Path) -> None:
    """In float32, and the rest of the layer is left alone; only where it was asked for."""
    pytest.importorskip("peft")
    recipe = make_recipe(
        student=str(teacher),
        teacher=str(teacher),
        losses={"ce": 1},
        train="lora",
        lora={"rank": 2, "targets": ["o_proj"]},
    )
    before, after = weights(teacher), weights(distill(recipe).output)
    changes = {
        name: after[name] - before[name] for name in before if not torch.equal(before[name], after[name])
    }
    assert changes.keys() == {name for name in before if "o_proj" in name}
    for change in changes.values():
        spectrum = torch.linalg.svdvals(change)
        assert spectrum[1] > 1e-4
        assert spectrum[2] < 1e-6


def test_adapters_reach_the_mlp_of_a_stock_output(make_recipe: MakeRecipe, teacher: Path) -> None:
    """PEFT takes its class for one with experts, and would leave these layers out without an error."""
    pytest.importorskip("peft")
    student = fold_latent(teacher, "--container", "stock", "--rank", "8", "--latent-norm", "linear")
    targets = ["kv_b_proj", "gate_proj", "down_proj"]
    made = make_recipe(student=str(student), **{**LORA, "lora": {"rank": 2, "targets": targets}})
    before, after = weights(student), weights(distill(made).output)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    # The scale of `kv_a_proj_with_mqa`, which makes the norm linear, is another after training.
    changed -= {name for name in before if "kv_a_proj" in name}
    assert changed == {name for name in before if name.split(".")[-2] in targets}


def test_a_stage_of_adapters_goes_on_in_the_same_bits(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Stopped in the second of two such stages: the first's are merged, the second's stored apart."""
    pytest.importorskip("peft")
    stages = [
        {"name": name, "tokens": 768, "lr": 1e-2, "batch_tokens": 192, **LORA} for name in ("first", "second")
    ]
    distill(make_recipe(output=str(tmp_path / "whole"), stages=stages))
    interrupt(make_recipe(stages=stages), 5)
    distill(make_recipe(stages=stages))
    assert same_bits(tmp_path / "out", tmp_path / "whole")


def test_layers_computed_twice_give_the_same_and_keep_less(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    kept: dict[bool, int] = {}
    for twice in (False, True):
        saved: set[int] = set()

        def pack(tensor: torch.Tensor, saved: set[int] = saved) -> torch.Tensor:
            saved.add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            distill(
                make_recipe(
                    output=str(tmp_path / str(twice)), gradient_checkpointing=twice, tokens=192, micro_batch=6
                )
            )
        kept[twice] = len(saved)
    assert same_bits(tmp_path / "True", tmp_path / "False")
    assert kept[True] < kept[False] / 2


def test_compiled_layers_compute_the_same(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and differentiated as always, but not translated to C++, which takes a minute."""
    compile_layer, compiled = nn.Module.compile, []

    def trace_layer(layer: nn.Module) -> None:
        compiled.append(layer)
        compile_layer(layer, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", trace_layer)
    torch._dynamo.reset()
    counters.clear()
    for name, compiles in (("plain", False), ("compiled", True)):
        distill(
            make_recipe(
                output=str(tmp_path / name), compile=compiles, tokens=384, gradient_checkpointing=True
            )
        )
    assert len(compiled) == 2
    assert counters["stats"]["unique_graphs"] > 0
    for mine, theirs in zip(metrics(tmp_path / "plain"), metrics(tmp_path / "compiled"), strict=True):
        assert mine["kl"] == pytest.approx(theirs["kl"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_stages_are_kept_as_checkpoints(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    stages = [{"name": name, "tokens": 384, "lr": 1e-2, "batch_tokens": 192} for name in ("first", "second")]
    for keep in (True, False):
        distill(make_recipe(stages=stages, save={"keep_stages": keep}, output=str(tmp_path / str(keep))))
    assert same_bits(tmp_path / "True", tmp_path / "False")
    assert [path.name for path in (tmp_path / "True" / "stages").iterdir()] == ["first"]
    assert not (tmp_path / "False" / "stages").exists()
    ids = torch.tensor([[0, 1, 2]])
    places = (tmp_path / "True" / "stages" / "first", tmp_path / "True")
    first, last = (AutoModelForCausalLM.from_pretrained(place)(ids).logits for place in places)
    assert not torch.equal(first, last)


@pytest.mark.parametrize("loss", ["hidden_mse", "hidden_cosine", "attention_relation"])
def test_losses_fall_whatever_the_micro_batches(make_recipe: MakeRecipe, tmp_path: Path, loss: str) -> None:
    lines = []
    for micro_batch in (4, 6):
        output = tmp_path / str(micro_batch)
        distill(make_recipe(output=str(output), losses={loss: 1.0}, micro_batch=micro_batch))
        lines.append(metrics(output))
    assert lines[0][-1][loss] < 0.8 * lines[0][0][loss]
    assert lines[0][-1]["forward_kl"] < lines[0][0]["forward_kl"]
    for mine, theirs in zip(*lines, strict=True):
        assert mine[loss] == pytest.approx(theirs[loss], rel=1e-3)
