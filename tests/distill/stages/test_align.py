"""Alignment layer by layer: the right inputs and targets for every family, one layer's graph at a time, the
same result however a step is cut."""

import gc
import signal
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfold.convert.formats import to_trainable
from kvfold.core.errors import InvalidInput
from kvfold.distill.data.batch import Batch
from kvfold.distill.losses.predictions import predict
from kvfold.distill.run.job import distill
from kvfold.distill.stages.align import adds, learn
from kvfold.distill.stages.capture import capturing
from kvfold.distill.stages.teacher import Online
from kvfold.models.decoder import Decoder
from kvfold.models.remote_code import is_remote
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

from ...support.distillation import KILLED, launch, metrics, weights, write_recipe
from ...support.folds import WEIGHTS, convert, fold_latent
from ...support.tiny import make
from ...support.warm_python import warm_python
from ..conftest import MakeRecipe

TOKENS = 24
ALIGN: dict[str, Any] = {"name": "align", "losses": {"attention_output": 1.0}, "train": "attention"}

# Family, what to fold to, the class of attention that comes out. At full rank, or with all heads, a fold
# loses nothing.
STOCK, OWN = ["--container", "stock"], ["--container", "remote"]
INTACT = [*OWN, "--rope", "intact"]
FOLDS = [
    ("llama", "gqa", [], "LlamaAttention"),
    ("llama", "mla", STOCK, "DeepseekV3Attention"),
    ("llama", "mla", OWN, "KvfoldDecoupledAttention"),
    ("llama", "mla", INTACT, "KvfoldIntactAttention"),
    ("granite", "mla", STOCK, "DeepseekV3Attention"),  # its factor on what a layer adds is in the weights
    ("olmo", "mla", STOCK, "DeepseekV3Attention"),  # and here what a layer adds has no mean
    ("gemma", "mla", STOCK, "DeepseekV3Attention"),
    ("qwen2", "mla", STOCK, "DeepseekV3Attention"),
    ("gemma3_text", "mla", INTACT, "KvfoldIntactAttention"),  # two tables of angles, two kinds of masks
    ("gpt2", "gqa", [], "GPTBigCodeAttention"),
    ("gpt2", "mla", OWN, "KvfoldDecoupledAttention"),
    ("gpt_neox", "gqa", [], "FalconAttention"),  # its layers give tuples
    ("gptj", "mla", OWN, "KvfoldDecoupledAttention"),  # rotates by itself
    ("falcon", "mla", OWN, "KvfoldDecoupledAttention"),
    ("gpt_oss", "mla", INTACT, "KvfoldIntactAttention"),
]


def folded(source: Path, *options: str) -> Path:
    convert(source, *options, *WEIGHTS, code=0)
    return source.with_name("out")


def opened(directory: Path) -> Decoder:
    loader = KvfoldForCausalLM if is_remote(directory) else AutoModelForCausalLM
    model = loader.from_pretrained(directory, dtype=torch.float32).eval()
    to_trainable(model)
    return Decoder(model)


def batch(windows: int = 2, documents: tuple[int, ...] = (TOKENS,)) -> Batch:
    ids_BS = torch.randint(3, 90, (windows, TOKENS), generator=torch.Generator().manual_seed(0))
    position_S = torch.cat([torch.arange(length) for length in documents])
    return Batch(ids_BS, ids_BS, position_S.expand(windows, -1))


def shares(student: Decoder, teacher: Decoder, given: Batch) -> list[float]:
    """Each layer's share of error, as a stage sees it."""
    change, calls, found = adds(student, teacher), student.calls(**given.inputs), []

    def see(number: int, hidden_BSD: Tensor, given_BSD: Tensor) -> None:
        error, power = learn(student, number, calls[number], hidden_BSD, change(given_BSD))
        found.append(float(error / power))

    Online(teacher.model).show_layers(given, see)
    return found


@pytest.mark.parametrize(("family", "target", "options", "module"), FOLDS)
def test_a_fold_that_loses_nothing_has_no_error(
    family: str, target: str, options: list[str], module: str, tmp_path: Path
) -> None:
    source = make(tmp_path / "source", family, **({"hidden_size": 64} if family == "gpt_neox" else {}))
    size = ["--rank", "full"] if target == "mla" else ["--kv-heads", "8"]
    student, teacher = opened(folded(source, "--to", target, *size, *options)), opened(source)
    assert type(student.attention(0)).__name__ == module
    found = shares(student, teacher, batch())
    assert len(found) == 2
    assert max(found) < 1e-10


def test_what_a_layer_learns_from_is_what_the_teacher_computes(tmp_path: Path) -> None:
    """The error of a pooled layer is that of its attention in the place of the teacher's own."""
    source = make(tmp_path / "source")
    student, teacher = (opened(folded(source, "--to", "gqa", "--kv-heads", "2")), opened(source))
    given, parent = batch(documents=(10, 14)), teacher.layer(1)
    own, found = parent.self_attn, shares(student, teacher, given)
    hybrid: list[Tensor] = []
    with torch.no_grad(), teacher.seen_by(lambda number, _, output_BSD: hybrid.append(output_BSD)):
        predict(teacher.model, given)
        parent.self_attn = student.attention(1)
        hook = parent.self_attn.register_forward_hook(lambda *seen: hybrid.append(seen[-1][0]))
        predict(teacher.model, given)
        parent.self_attn = own
    hook.remove()
    wanted_BSD, other_BSD = hybrid[1], hybrid[-1]
    expected = (other_BSD - wanted_BSD).square().sum() / wanted_BSD.square().sum()
    assert found[1] == pytest.approx(float(expected), rel=1e-5)


def test_calls_and_captures_leave_a_model_as_it_was(tmp_path: Path) -> None:
    decoder = opened(make(tmp_path / "source", "gemma2"))
    given = batch()
    with torch.no_grad():
        before = predict(decoder.model, given).hidden_TD
        with capturing(decoder.model, attention=True) as captured:
            during = predict(decoder.model, given).hidden_TD
        decoder.calls(**given.inputs)
        after = predict(decoder.model, given).hidden_TD
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert [tuple(hidden.shape) for hidden in captured.hidden] == [(2, TOKENS, 32)] * 2
    assert [tuple(query.shape) for query, _, _ in captured.attention] == [(2, 8, TOKENS, 8)] * 2
    assert "forward" not in decoder.layer(0).__dict__
    falcon = opened(make(tmp_path / "falcon", "falcon")).model
    with (
        pytest.raises(InvalidInput, match="cannot be computed for FalconForCausalLM"),
        capturing(falcon, attention=True),
    ):
        predict(falcon, given)


@contextmanager
def graph_bytes() -> Iterator[list[int]]:
    """Count the bytes that graphs hold for their backward pass: now, and at most."""
    held = [0, 0]

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def pack(tensor: Tensor) -> Any:
        kept, size = Kept(tensor), tensor.nbytes
        held[0] += size
        held[1] = max(held)
        weakref.finalize(kept, lambda: held.__setitem__(0, held[0] - size))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        yield held


def test_the_graph_of_one_layer_exists_at_a_time(tmp_path: Path) -> None:
    most = []
    for layers in (2, 6):
        source = make(tmp_path / f"source-{layers}", num_hidden_layers=layers)
        student = opened(fold_latent(source, "--kv-budget", "50%"))
        teacher = opened(source)
        gc.collect()
        with graph_bytes() as held:
            assert len(shares(student, teacher, batch())) == layers
        assert held[0] == 0
        most.append(held[1])
    assert most[0] == most[1] > 0


def test_a_stage_lowers_every_layer_s_error_and_kl_without_being_told(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    kl = {"name": "kl", "tokens": 192, "lr": 1e-6, "batch_tokens": 192}
    plain = distill(make_recipe(stages=[kl], output=str(tmp_path / "plain")))
    result = distill(make_recipe(stages=[{**ALIGN, "tokens": 1920, "lr": 1e-2, "batch_tokens": 192}, kl]))
    lines = [line for line in metrics(result.output) if line["stage"] == "align"]
    assert len(lines) == 10
    for name in ("align.layer.0", "align.layer.1"):
        assert lines[-1][name] < 0.7 * lines[0][name]
    assert lines[0]["attention_output"] == pytest.approx(
        (lines[0]["align.layer.0"] + lines[0]["align.layer.1"]) / 2
    )
    assert result.stages[1]["first"]["kl"] < 0.8 * plain.stages[0]["first"]["kl"]


def test_micro_batches_and_stops_change_no_aligned_step(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    found = []
    for size in (6, 4, 1):
        result = distill(make_recipe(**ALIGN, tokens=576, micro_batch=size, output=str(tmp_path / str(size))))
        found.append(metrics(result.output))
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert mine["align.layer.1"] == pytest.approx(theirs["align.layer.1"], rel=1e-4)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    "change", [{"precision": "bf16"}, {"train": "lora"}, {"gradient_checkpointing": True}]
)
def test_alignment_goes_along(change: dict[str, Any], make_recipe: MakeRecipe, fresh_state: None) -> None:
    result = distill(make_recipe(**{**ALIGN, "lr": 1e-2, **change}))
    (stage,) = result.stages
    assert stage["last"]["attention_output"] < 0.8 * stage["first"]["attention_output"]


def test_two_processes_and_a_kill(
    make_recipe: MakeRecipe, float32_models: dict[str, str], tmp_path: Path
) -> None:
    """With a teacher on disk for the second stage, which both processes write."""
    stage = {**ALIGN, "tokens": 576, "lr": 1e-3, "batch_tokens": 192, "micro_batch": 2}
    kl = {"name": "kl", "tokens": 192, "lr": 1e-4, "batch_tokens": 192, "train": "attention"}
    alone, again, together = (tmp_path / name for name in ("alone", "again", "together"))
    distill(make_recipe(stages=[stage, kl], output=str(alone), **float32_models))
    cache = {"teacher_cache": str(tmp_path / "cache")}
    assert (
        launch(make_recipe(stages=[stage, kl], output=str(together), **float32_models, **cache), "ddp") == 0
    )
    torch.testing.assert_close(weights(together), weights(alone), rtol=0, atol=2e-6)
    for mine, theirs in zip(metrics(together), metrics(alone), strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)

    recipe = make_recipe(stages=[stage, kl], output=str(again), save={"every": 1}, **float32_models)
    command = [warm_python(), "-c", KILLED, str(write_recipe(recipe, tmp_path / "recipe.yaml")), "2"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -signal.SIGKILL
    distill(recipe)
    mine, other = weights(again), weights(alone)
    assert all(torch.equal(mine[name], other[name]) for name in other)
