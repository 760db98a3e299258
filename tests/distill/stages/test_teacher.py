"""Teachers: beside the student, sharing memory with it, or on disk; all of them give the same predictions."""

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.core.errors import InvalidInput
from kvfold.distill.data.batch import Batch
from kvfold.distill.data.token_store import open_windows, write_tokens
from kvfold.distill.losses import kl
from kvfold.distill.recipe.recipe import Data
from kvfold.distill.run import job
from kvfold.distill.run.job import distill
from kvfold.distill.stages import teacher_cache as cached
from kvfold.distill.stages.student import load_student
from kvfold.distill.stages.teacher import Online, load_shared, load_teacher
from kvfold.distill.stages.teacher_cache import Cached, identify, open_cache, write_cache
from kvfold.models.causal_lm import Loaded

from ..conftest import MakeRecipe, save_tokenizer
from ..run.test_job import metrics, weights

CPU = torch.device("cpu")
ATTENTION = {f"model.layers.{layer}.self_attn.{role}_proj.weight" for layer in (0, 1) for role in "qkvo"}


@pytest.fixture
def loaded(student: Path) -> Loaded:
    return load_student(student, 32, CPU)


@pytest.fixture
def online(teacher: Path, loaded: Loaded) -> Online:
    return load_teacher(teacher, False, CPU, loaded)


def batch(windows: int = 3) -> Batch:
    ids_BS = torch.randint(0, 258, (windows, 32), generator=torch.Generator().manual_seed(0))
    return Batch(ids_BS, ids_BS, torch.arange(32).expand(windows, 32))


def storages(model: Any) -> dict[int, int]:
    """Bytes by place in memory."""
    return {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
        for weight in model.parameters()
    }


@pytest.fixture
def like_source(teacher: Path, student: Path, tmp_path: Path) -> Path:
    """The student with everything but attention bit for bit as the source has it."""
    model = LlamaForCausalLM.from_pretrained(student, dtype=torch.float32)
    source = LlamaForCausalLM.from_pretrained(teacher).state_dict()
    model.load_state_dict(
        {name: tensor for name, tensor in source.items() if "self_attn" not in name}, strict=False
    )
    model.save_pretrained(tmp_path / "like")
    save_tokenizer(tmp_path / "like")
    shutil.copyfile(student / "kvfold.json", tmp_path / "like" / "kvfold.json")
    return tmp_path / "like"


def test_shared_is_the_same_teacher_in_the_memory_of_its_attention(
    teacher: Path, online: Online, like_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = load_student(like_source, 32, CPU)
    shared = load_shared(teacher, False, CPU, student, ATTENTION)
    own = storages(shared.model).keys() - storages(student.model).keys()
    assert own == {shared.model.get_parameter(name).untyped_storage().data_ptr() for name in ATTENTION}
    both = storages(student.model) | storages(shared.model)
    assert sum(both.values()) == sum(storages(student.model).values()) + 8 * 4 * 32 * 32
    assert (
        "student and teacher share 20,704 weights; the teacher has 8,192 of its own"
        in capsys.readouterr().err
    )
    mine, its = shared.predictions(batch()), online.predictions(batch())
    assert torch.equal(mine.hidden_TD, its.hidden_TD)
    assert torch.equal(mine.weight_VD, its.weight_VD)
    assert not any(weight.requires_grad for weight in shared.model.parameters())
    assert all(weight.requires_grad for weight in student.model.parameters())


def test_shared_keeps_what_a_stage_trains(teacher: Path, like_source: Path) -> None:
    """With a copy of its own the teacher stays what it was, whatever happens to the student."""
    student = load_student(like_source, 32, CPU)
    norms = {name for name, _ in student.model.named_parameters() if "norm" in name}
    shared = load_shared(teacher, False, CPU, student, ATTENTION | norms)
    before = shared.predictions(batch()).hidden_TD
    with torch.no_grad():
        for name, weight in student.model.named_parameters():
            if name in ATTENTION | norms:
                weight.add_(1.0)
    assert torch.equal(shared.predictions(batch()).hidden_TD, before)


def test_a_run_with_a_shared_teacher_gives_the_same_bits(
    make_recipe: MakeRecipe, like_source: Path, tmp_path: Path
) -> None:
    found = []
    for named in (None, "shared"):
        recipe = make_recipe(
            student=str(like_source), teacher=named, train="attention", output=str(tmp_path / str(named))
        )
        found.append(weights(distill(recipe)["output"]))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    with pytest.raises(ValueError, match="write train: attention there, or leave teacher out"):
        make_recipe(student=str(like_source), teacher="shared")


@pytest.fixture
def cache(tmp_path: Path, text: Path, teacher: Path, online: Online, loaded: Loaded) -> dict[str, Any]:
    """A cache of seven windows, and what it was made of."""
    data = Data(source=str(text), seq_len=32)
    write_tokens(tmp_path / "tokens.bin", data, loaded.tokenizer, 7, vocabulary=258)
    windows, identity = open_windows(tmp_path / "tokens.bin", data), identify(teacher, 32, "auto", False)
    write_cache(tmp_path / "cache", online, windows, 7, identity, Accelerator(cpu=True))
    return {
        "directory": tmp_path / "cache",
        "windows": windows,
        "count": 7,
        "identity": identity,
        "device": CPU,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kl_to_a_cache_is_exact_within_its_dtype(
    dtype: str, cache: dict[str, Any], teacher: Path, online: Online, loaded: Loaded, tmp_path: Path
) -> None:
    windows = cache["windows"]
    write_cache(
        tmp_path / dtype, online, windows, 7, identify(teacher, 32, dtype, False), Accelerator(cpu=True)
    )
    found = open_cache(tmp_path / dtype, windows, 7, identify(teacher, 32, dtype, False), CPU)
    given = windows.batch([5, 0, 2])  # in another order, and other neighbours, than they were written in
    student = Online(loaded.model).predictions(given)
    labels_T = given.labels_BS.flatten()
    exact, _ = kl(student, online.predictions(given), labels_T)
    near, _ = kl(student, found.predictions(given), labels_T)
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    assert float(near) == pytest.approx(float(exact), rel=tolerance)
    size = sum(file.stat().st_size for file in (tmp_path / dtype).glob("hidden-*"))
    assert (
        7 * 32 * 32 * (4 if dtype == "float32" else 2)
        < size
        < 7 * 32 * 32 * (4 if dtype == "float32" else 2) + 1000
    )


def test_a_run_from_a_cache_needs_no_teacher(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = distill(make_recipe(output=str(tmp_path / "plain")))
    setting = {"teacher_cache": str(tmp_path / "cache")}
    first = distill(make_recipe(**setting, output=str(tmp_path / "first")))
    monkeypatch.setattr(job, "open_teacher", None)
    second = distill(make_recipe(**setting, output=str(tmp_path / "second"), micro_batch=6))
    for result, exactly in ((first, 1e-5), (second, 1e-3)):
        for mine, other in zip(metrics(result["output"]), metrics(plain["output"]), strict=True):
            assert mine["kl"] == pytest.approx(other["kl"], rel=exactly)
    assert first["teacher"] == plain["teacher"]


def test_a_cache_goes_on_where_it_was_stopped(
    cache: dict[str, Any], online: Online, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "_FILE_BYTES", 2 * 32 * 32 * 4)  # two windows a file
    monkeypatch.setattr(cached, "_BATCH", 2)
    arguments = (cache["windows"], cache["count"], cache["identity"], Accelerator(cpu=True))
    predictions, asked = online.predictions, []

    def count(given: Batch) -> Any:
        asked.append(len(given.input_ids_BS))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return predictions(given)

    monkeypatch.setattr(online, "predictions", count)
    with pytest.raises(KeyboardInterrupt):
        write_cache(tmp_path / "again", online, *arguments)
    assert not (tmp_path / "again").exists()
    write_cache(tmp_path / "again", online, *arguments)
    assert asked == [2, 2, 2, 2, 1, 1]  # stopped in the third file of four; the last is for the head
    one, other = (Cached(tmp_path / name, CPU) for name in ("again", "cache"))
    given = cache["windows"].batch(range(7))
    torch.testing.assert_close(one.predictions(given).hidden_TD, other.predictions(given).hidden_TD)
    assert not list(tmp_path.glob("again.partial"))


def test_a_cache_for_something_else_is_refused(
    cache: dict[str, Any], online: Online, teacher: Path, text: Path, loaded: Loaded, tmp_path: Path
) -> None:
    for change, message in (
        ({"seq_len": 16}, r"another seq_len \(32, not 16\)"),
        ({"dtype": "float16"}, r"another dtype \(float32, not float16\)"),
        ({"computed_in": "bfloat16"}, r"another computed_in \(float32, not bfloat16\)"),
        ({"teacher": {"model.safetensors": "0"}}, "another teacher; name another directory"),
    ):
        with pytest.raises(InvalidInput, match=f"was made for {message}"):
            open_cache(**{**cache, "identity": {**cache["identity"], **change}})
    data = Data(source=str(text), seq_len=32, seed=1)
    write_tokens(tmp_path / "other.bin", data, loaded.tokenizer, 7, vocabulary=258)
    with pytest.raises(InvalidInput, match="lacks a window of this run, so it is for other data"):
        open_cache(**{**cache, "windows": open_windows(tmp_path / "other.bin", data)})
    with pytest.raises(
        InvalidInput, match="holds last hidden states only; for losses on layers leave it out"
    ):
        Cached(cache["directory"], CPU).captured(batch())
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="empty is no cache written by kvfold"):
        open_cache(**{**cache, "directory": tmp_path / "empty"})
    for name, content in (("plan.json", json.dumps({"seq_len": 8})), ("thesis.tex", "mine")):
        (tmp_path / name / "mine.partial").mkdir(parents=True)
        (tmp_path / name / "mine.partial" / name).write_text(content)
        with pytest.raises(InvalidInput, match="is no unfinished teacher_cache of this run; remove it"):
            write_cache(
                tmp_path / name / "mine",
                online,
                cache["windows"],
                7,
                cache["identity"],
                Accelerator(cpu=True),
            )


def test_two_runs_do_not_write_one_cache(cache: dict[str, Any], online: Online, tmp_path: Path) -> None:
    (tmp_path / "mine.partial").mkdir()
    with (tmp_path / "mine.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            InvalidInput, match=r"another run is writing teacher_cache .*; wait for it, or name another"
        ):
            write_cache(
                tmp_path / "mine", online, cache["windows"], 7, cache["identity"], Accelerator(cpu=True)
            )


def test_what_was_begun_for_other_windows_is_not_taken_up(
    cache: dict[str, Any], online: Online, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cached, "_end", die)
        with pytest.raises(KeyboardInterrupt):
            write_cache(
                tmp_path / "mine", online, cache["windows"], 5, cache["identity"], Accelerator(cpu=True)
            )
    with pytest.raises(InvalidInput, match="is no unfinished teacher_cache of this run; remove it"):
        write_cache(tmp_path / "mine", online, cache["windows"], 7, cache["identity"], Accelerator(cpu=True))


def test_a_larger_teacher_with_a_padded_vocabulary_teaches(
    make_recipe: MakeRecipe, teacher: Path, tmp_path: Path
) -> None:
    config = LlamaConfig.from_pretrained(
        teacher, vocab_size=300, hidden_size=48, num_hidden_layers=3, head_dim=12
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "large")
    save_tokenizer(tmp_path / "large")
    result = distill(make_recipe(teacher=str(tmp_path / "large")))
    found = [metrics(result["output"])]
    with torch.no_grad():
        model.get_input_embeddings().weight[258:] = (
            7.0  # padding, which is no token: nothing may depend on it
        )
    model.save_pretrained(tmp_path / "changed")
    save_tokenizer(tmp_path / "changed")
    found.append(
        metrics(
            distill(make_recipe(teacher=str(tmp_path / "changed"), output=str(tmp_path / "out2")))["output"]
        )
    )
    assert [line["kl"] for line in found[0]] == [line["kl"] for line in found[1]]
    assert found[0][-1]["kl"] < found[0][0]["kl"]
