"""A whole distillation: what it writes, what it leaves alone, what it refuses."""

import fcntl
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfold.checkpoints.record import describe, read_record, write_record
from kvfold.core.errors import InvalidInput
from kvfold.distill.data.order import TrainingWindows
from kvfold.distill.run.job import distill

from ...support.distillation import metrics, weights
from ...support.folds import fold_latent
from ..conftest import MakeRecipe


def test_kl_falls_and_the_output_is_whole(make_recipe: MakeRecipe, student: Path, teacher: Path) -> None:
    result = distill(make_recipe(losses={"kl": 1.0, "ce": 0.1}))
    out = result.output
    (stage,) = result.stages
    assert stage["last"]["kl"] < 0.7 * stage["first"]["kl"]
    assert (result.steps, result.tokens, result.teacher) == (10, 1920, teacher)

    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert set(lines[0]) == {
        "step", "stage", "tokens", "kl", "ce", "forward_kl", "same_top1", "teacher_ce", "lr", "grad_norm",
        "tokens_per_second",
        "peak_memory_gib",
    }  # fmt: skip

    before, after = weights(student), weights(out)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in after.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in before.items()
    }
    assert all(not torch.equal(after[name], before[name]) for name in before if "proj" in name)
    assert (out / "config.json").read_bytes() == (student / "config.json").read_bytes()
    assert (out / "tokenizer.json").read_bytes() == (student / "tokenizer.json").read_bytes()
    record = read_record(out)
    assert record["parents"] == [{"stage": "convert", "path": str(student)}]
    assert record["distill"]["tokens"] == 1920
    AutoModelForCausalLM.from_pretrained(out)(torch.tensor([[0, 1]]))
    assert not out.with_name("out.partial").exists()


def test_latents_are_trained_open_only(make_recipe: MakeRecipe, teacher: Path, tmp_path: Path) -> None:
    """The stored down-projection is about 6e-8 small; trained like that, the first step would wipe it out."""
    latent = fold_latent(teacher, "--kv-budget", "50%", "--latent-norm", "linear")
    result = distill(make_recipe(student=str(latent)))
    (stage,) = result.stages
    assert stage["last"]["kl"] < 0.8 * stage["first"]["kl"]
    after = weights(result.output)
    norms = [tensor for name, tensor in after.items() if "kv_a_layernorm" in name]
    assert norms
    assert all(bool((norm == 2**14).all()) for norm in norms)
    again = distill(make_recipe(student=str(result.output), output=str(tmp_path / "again"), tokens=192))
    assert again.stages[0]["first"]["kl"] < stage["first"]["kl"]


def test_a_student_equal_to_its_teacher_stays(make_recipe: MakeRecipe, teacher: Path) -> None:
    out = distill(make_recipe(student=str(teacher), teacher=str(teacher), grad_clip=None)).output
    assert all(line["kl"] == 0 and line["grad_norm"] < 1e-6 for line in metrics(out))


def test_neither_micro_batches_nor_stages_change_the_sum(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Six windows a step as 4 + 2, 6 and 1 + 1 + ...: one division by all tokens, whatever the parts."""
    lines = []
    for micro_batch in (4, 6, 1):
        output = tmp_path / str(micro_batch)
        distill(make_recipe(output=str(output), micro_batch=micro_batch, tokens=576))
        lines.append(metrics(output))
    for other in lines[1:]:
        for mine, theirs in zip(lines[0], other, strict=True):
            assert mine["kl"] == pytest.approx(theirs["kl"], rel=1e-4)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_stages_follow_on_new_data(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    batch = TrainingWindows.batch

    def read_batch(self: TrainingWindows, cursors: Sequence[int]) -> Tensor:
        read.extend(cursors)
        return batch(self, cursors)

    monkeypatch.setattr(TrainingWindows, "batch", read_batch)
    stage = {"tokens": 384, "lr": 1e-2, "batch_tokens": 192, "schedule": "constant"}
    stages = [
        {**stage, "name": "first", "train": "attention"},
        {**stage, "name": "second", "losses": {"ce": 1.0}},
    ]
    result = distill(make_recipe(stages=stages))
    assert [(stage["name"], stage["steps"], set(stage["last"])) for stage in result.stages] == [
        ("first", 2, {"kl"}),
        ("second", 2, {"ce"}),
    ]
    assert [line["tokens"] for line in metrics(result.output)] == [192, 384, 576, 768]
    assert read == list(range(24))


def test_an_output_that_exists_or_is_being_made_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with (tmp_path / "out.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InvalidInput, match="another kvfold is at work in"):
            distill(make_recipe())
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidInput, match=r"out exists and nothing is overwritten; .* --set output=DIR"):
        distill(make_recipe())


def test_outputs_stay_out_of_models(
    make_recipe: MakeRecipe, student: Path, teacher: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(teacher)
    for output, directory in ((student / "out", student), (tmp_path / "link" / "deep" / "out", teacher)):
        with pytest.raises(InvalidInput, match=rf"output {output} is inside {directory}, .* never written"):
            distill(make_recipe(output=str(output), tokens=192))
        assert {path.name for path in directory.iterdir() if path.is_dir()} == set()


def test_a_teacher_cache_in_the_place_of_something_else_is_refused_before_the_run(
    make_recipe: MakeRecipe, student: Path, teacher: Path, tmp_path: Path
) -> None:
    out, foreign = tmp_path / "out", tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").touch()
    roles = {
        student / "cache": "student", teacher: "teacher", out: "output", out / "cache": "output",
        tmp_path / "out.partial": "unfinished output",
    }  # fmt: skip
    sentences = {
        cache: f"is the directory of the {role} or inside it; name a directory elsewhere"
        for cache, role in roles.items()
    }
    sentences[foreign] = "is no cache of a teacher; name another directory"
    for cache, sentence in sentences.items():
        with pytest.raises(InvalidInput, match=f"^teacher_cache {cache} .*{sentence}"):
            distill(make_recipe(output=str(out), tokens=192, teacher_cache=str(cache)))
    assert not (student / "cache").exists()


def test_a_source_is_moved(make_recipe: MakeRecipe, student: Path, teacher: Path, tmp_path: Path) -> None:
    orphan = tmp_path / "orphan"
    shutil.copytree(student, orphan)
    gone = describe(teacher, None) | {"path": str(tmp_path / "gone")}
    write_record(orphan, {"schema": 1, "stage": "convert", "source": gone, "parents": []})
    with pytest.raises(InvalidInput, match=r"does not exist any more; name it with --set teacher=DIR$"):
        distill(make_recipe(student=str(orphan)))


def test_a_flaw_far_in_a_text_is_found_before_anything_else(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The run reads a thousandth of the file."""
    file = tmp_path / "long.txt"
    file.write_bytes(b"some words " * 200_000 + b"\xff")
    with pytest.raises(InvalidInput, match=r"long\.txt cannot be read: it is .* UTF-8 text \(byte 2200000\)"):
        distill(make_recipe(data={"source": str(file), "seq_len": 32}))
    assert not list((tmp_path / "out.partial").glob("tokens*"))


def test_a_full_gpu_is_told(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("kvfold.distill.stages.objective.predict", full)
    sentence = r"the GPU has too little memory .*; use micro_batch: 1 in each stage, gradient_checkpointing"
    with pytest.raises(InvalidInput, match=sentence):
        distill(make_recipe())
    with pytest.raises(InvalidInput, match="use teacher: shared; kvfold distill explain"):
        distill(make_recipe(micro_batch=1, gradient_checkpointing=True, train="attention"))


STREAM = {"mode": "stream", "losses": {"attention_output": 1.0}, "train": "attention"}
LAYERWISE = {**STREAM, "mode": "layerwise"}


@pytest.mark.parametrize(("changes", "is_sharded", "is_shared"), [
    ({"train": "all"}, False, False),
    ({"train": "attention"}, False, True),
    ({"train": "attention+norms"}, False, True),
    ({"train": "lora"}, False, True),
    ({"train": "attention", "teacher": "shared"}, False, False),
    ({"train": "attention", "teacher": "another"}, False, False),
    ({"train": "attention"}, True, False),
    (STREAM, False, False),
    (LAYERWISE, False, True),
    (LAYERWISE, True, True),
])  # fmt: skip
def test_a_shared_teacher_is_named_where_it_is_allowed(
    changes: dict[str, Any],
    is_sharded: bool,
    is_shared: bool,
    make_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("kvfold.distill.run.job.find_result", full)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(is_sharded).lower())
    with pytest.raises(InvalidInput) as mistake:
        distill(make_recipe(**changes))
    assert ("teacher: shared" in str(mistake.value)) == is_shared


@pytest.mark.parametrize(("first", "second", "told"), [
    ("fp32", "bf16", "precision fp32 on cpu, and this run takes precision bf16 on cpu"),
    ("bf16", "auto", "precision bf16 on cpu, and this run takes precision fp32 on cpu"),
])  # fmt: skip
def test_another_precision_in_the_same_process_is_refused(
    first: str, second: str, told: str, make_recipe: MakeRecipe, fresh_state: None, tmp_path: Path
) -> None:
    """accelerate keeps the first one of a process, and would end with an error of its own."""
    distill(make_recipe(tokens=192, precision=first))
    with pytest.raises(InvalidInput, match=f"{told}; start another process for it"):
        distill(make_recipe(tokens=192, precision=second, output=str(tmp_path / "other")))
    assert distill(make_recipe(tokens=192, precision=first, output=str(tmp_path / "third"))).steps == 1
