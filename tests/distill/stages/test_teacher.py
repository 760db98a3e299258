"""Teachers: next to the student, sharing memory with it, or on disk; all of them give the same predictions."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from kvfold.core.errors import InvalidInput
from kvfold.distill.data.batch import Batch
from kvfold.distill.data.order import TrainingWindows
from kvfold.distill.data.token_store import open_windows, write_tokens
from kvfold.distill.recipe.recipe import Data
from kvfold.distill.run import job
from kvfold.distill.run.job import distill
from kvfold.distill.stages.cached_teacher import (
    DTYPES,
    OPTION,
    CachedTeacher,
    cached_teacher,
    identify,
    keys,
    write_cache,
)
from kvfold.distill.stages.student import load_student
from kvfold.distill.stages.teacher import Online, load_shared, load_teacher
from kvfold.models import teacher_cache
from kvfold.models.causal_lm import Loaded
from kvfold.models.teacher_cache import TeacherCache

from ...support.dense_losses import chunked
from ...support.distillation import another, metrics, weights
from ...support.tokenizers import save_tokenizer
from ..conftest import MakeRecipe

CPU = torch.device("cpu")
ATTENTION = {f"model.layers.{layer}.self_attn.{role}_proj.weight" for layer in (0, 1) for role in "qkvo"}


@pytest.fixture
def loaded(student: Path) -> Loaded:
    return load_student(student, 32, CPU)


@pytest.fixture
def online(make_recipe: MakeRecipe, teacher: Path, loaded: Loaded) -> Online:
    return load_teacher(teacher, make_recipe(), False, CPU, loaded)


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
    make_recipe: MakeRecipe,
    teacher: Path,
    online: Online,
    like_source: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    student = load_student(like_source, 32, CPU)
    shared = load_shared(teacher, make_recipe(), False, CPU, student, ATTENTION)
    own = storages(shared.model).keys() - storages(student.model).keys()
    assert own == {shared.model.get_parameter(name).untyped_storage().data_ptr() for name in ATTENTION}
    both = storages(student.model) | storages(shared.model)
    assert sum(both.values()) == sum(storages(student.model).values()) + 8 * 4 * 32 * 32
    assert "student and teacher share 20,704 weights; the teacher has 8,192 of its own" in caplog.text
    mine, its = shared.predictions(batch()), online.predictions(batch())
    assert torch.equal(mine.hidden_TD, its.hidden_TD)
    assert torch.equal(mine.weight_VD, its.weight_VD)
    assert not any(weight.requires_grad for weight in shared.model.parameters())
    assert all(weight.requires_grad for weight in student.model.parameters())


def test_shared_keeps_what_a_stage_trains(make_recipe: MakeRecipe, teacher: Path, like_source: Path) -> None:
    """With a copy of its own the teacher stays what it was, whatever happens to the student."""
    student = load_student(like_source, 32, CPU)
    norms = {name for name, _ in student.model.named_parameters() if "norm" in name}
    shared = load_shared(teacher, make_recipe(), False, CPU, student, ATTENTION | norms)
    before = shared.predictions(batch()).hidden_TD
    with torch.no_grad():
        for name, weight in student.model.named_parameters():
            if name in ATTENTION | norms:
                weight.add_(1.0)
    assert torch.equal(shared.predictions(batch()).hidden_TD, before)


@pytest.mark.parametrize("train", ["attention+norms", "lora"])
def test_norms_and_adapters_share_a_teacher(train: str, make_recipe: MakeRecipe, like_source: Path) -> None:
    if train == "lora":
        pytest.importorskip("peft", reason="pip install peft")
    recipe = make_recipe(tokens=192, train=train, student=str(like_source), teacher="shared")
    assert distill(recipe).steps == 1


def test_a_shared_teacher_gives_the_same(make_recipe: MakeRecipe, like_source: Path, tmp_path: Path) -> None:
    found = []
    for named in (None, "shared"):
        recipe = make_recipe(
            student=str(like_source), teacher=named, train="attention", output=str(tmp_path / str(named))
        )
        found.append(weights(distill(recipe).output))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    with pytest.raises(ValueError, match="write train: attention there, or teacher: null"):
        make_recipe(student=str(like_source), teacher="shared")


@pytest.fixture
def windows(tmp_path: Path, text: Path, loaded: Loaded) -> TrainingWindows:
    """Seven windows."""
    data = Data(source=str(text), seq_len=32)
    write_tokens(tmp_path / "tokens.bin", data, loaded.tokenizer, 7, vocabulary=258)
    return open_windows(tmp_path / "tokens.bin", data)


def written(
    directory: Path, windows: TrainingWindows, teacher: Path, online: Online, dtype: str = "auto"
) -> TeacherCache:
    """A cache of the seven windows."""
    identity = identify(teacher, dtype, False)
    cache = TeacherCache(directory, OPTION, identity)
    write_cache(cache, online, [(windows, 7)], DTYPES[identity["dtype"]], Accelerator(cpu=True))
    cache.refresh()
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kl_to_a_cache_is_exact_within_its_dtype(
    dtype: str, windows: TrainingWindows, teacher: Path, online: Online, loaded: Loaded, tmp_path: Path
) -> None:
    found = CachedTeacher(written(tmp_path / dtype, windows, teacher, online, dtype), CPU)
    given = windows.batch([5, 0, 2])  # in another order, and other neighbours, than they were written in
    student = Online(loaded.model).predictions(given)
    labels_T = given.labels_BS.flatten()
    exact = chunked("kl", student, online.predictions(given), labels_T)
    near = chunked("kl", student, found.predictions(given), labels_T)
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    assert float(near) == pytest.approx(float(exact), rel=tolerance)
    size = sum(file.stat().st_size for file in (tmp_path / dtype).glob("hidden-*"))
    assert 0 < size - 7 * 32 * 32 * (4 if dtype == "float32" else 2) < 1000


def test_a_cache_teaches(make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = distill(make_recipe(output=str(tmp_path / "plain")))
    setting = {"teacher_cache": str(tmp_path / "cache")}
    first = distill(make_recipe(**setting, output=str(tmp_path / "first")))
    monkeypatch.setattr(job, "open_teacher", None)
    second = distill(make_recipe(**setting, output=str(tmp_path / "second"), micro_batch=6))
    for result, exactly in ((first, 1e-5), (second, 1e-3)):
        for mine, other in zip(metrics(result.output), metrics(plain.output), strict=True):
            assert mine["kl"] == pytest.approx(other["kl"], rel=exactly)
    assert first.teacher == plain.teacher


def test_a_cache_goes_on_where_it_was_stopped(
    windows: TrainingWindows, teacher: Path, online: Online, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_cache, "FILE_BYTES", 2 * 32 * 32 * 4)  # two windows a file
    whole = written(tmp_path / "whole", windows, teacher, online)
    predictions, asked = online.predictions, []

    def count(given: Batch) -> Any:
        asked.append(len(given.input_ids_BS))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return predictions(given)

    monkeypatch.setattr(online, "predictions", count)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "again", windows, teacher, online)
    (tmp_path / "again" / "hidden-0000000000000000.safetensors.partial").write_bytes(b"cut off")
    written(tmp_path / "again", windows, teacher, online)
    assert asked == [2, 2, 2, 2, 1]  # stopped in the third file of four
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == files
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not whole.missing(keys(windows.batch(range(7))))


def test_a_cache_grows_with_what_it_is_asked_for(
    windows: TrainingWindows,
    teacher: Path,
    online: Online,
    text: Path,
    loaded: Loaded,
    make_recipe: MakeRecipe,
    tmp_path: Path,
) -> None:
    """Other data of the same teacher goes into the same directory, and only that is computed."""
    written(tmp_path / "cache", windows, teacher, online)
    before = set((tmp_path / "cache").iterdir())
    data = Data(source=str(text), seq_len=32, seed=1)
    write_tokens(tmp_path / "other.bin", data, loaded.tokenizer, 7, vocabulary=258)
    other = open_windows(tmp_path / "other.bin", data)
    arguments = (make_recipe(), teacher, Accelerator(cpu=True))
    found = cached_teacher(tmp_path / "cache", [(windows, 7), (other, 7)], *arguments, lambda: online)
    assert before < set((tmp_path / "cache").iterdir())
    for batches in (windows, other):
        given = batches.batch(range(7))
        torch.testing.assert_close(found.predictions(given).hidden_TD, online.predictions(given).hidden_TD)

    def never() -> Online:
        raise AssertionError("the cache is complete")

    cached_teacher(tmp_path / "cache", [(other, 7), (windows, 7)], *arguments, never)


def test_two_runs_one_cache(windows: TrainingWindows, teacher: Path, online: Online, tmp_path: Path) -> None:
    identity = identify(teacher, "auto", False)
    one, other = (TeacherCache(tmp_path / "cache", OPTION, identity) for _ in range(2))
    for cache in (one, other):  # the second has looked before the first wrote
        write_cache(cache, online, [(windows, 7)], torch.float32, Accelerator(cpu=True))
    one.refresh()
    given = windows.batch(range(7))
    assert torch.equal(one.hidden(keys(given)).flatten(0, 1), online.predictions(given).hidden_TD)
    assert len(list((tmp_path / "cache").glob("hidden-*"))) == 1


def test_hidden_states_depend_on_what_names_the_quantised_weights() -> None:
    hashes = {"config.json": "1", "model.safetensors": "2", "modeling_kvfold.py": "3"}
    decisive = {**hashes, "hf_quant_config.json": "4"}
    told = teacher_cache.identify({**decisive, "tokenizer_config.json": "5", "vocab.json": "6"}, "float32")
    assert told["teacher"] == decisive
    assert teacher_cache.identify(hashes, "float32")["teacher"] == hashes


def test_another_cache_fails(windows: TrainingWindows, online: Online, teacher: Path, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    cache = written(place, windows, teacher, online)
    identity = identify(teacher, "auto", False)
    for change, message in (
        ({"dtype": "float16"}, r"another dtype \('float32', not 'float16'\)"),
        ({"computed_in": "bfloat16"}, r"another computed_in \('float32', not 'bfloat16'\)"),
        ({"teacher": {"model.safetensors": "0"}}, "another teacher; name another directory"),
    ):
        with pytest.raises(InvalidInput, match=f"was made with {message}"):
            TeacherCache(place, OPTION, {**identity, **change})
    with pytest.raises(InvalidInput, match="lacks a window of this run"):
        CachedTeacher(cache, CPU).predictions(batch())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "manifest.json").write_text("[]")
    for name in ("mine", "list"):
        with pytest.raises(InvalidInput, match=f"{name} is no cache of a teacher; name another directory"):
            TeacherCache(tmp_path / name, OPTION, identity)


@pytest.mark.parametrize("name", ["hidden", "head"])
def test_a_changed_cache_is_refused_where_it_is_used(
    name: str, windows: TrainingWindows, online: Online, teacher: Path, tmp_path: Path
) -> None:
    """A changed bit of a number gives other losses, and nobody would see it."""
    written(tmp_path / "cache", windows, teacher, online)
    (file,) = (tmp_path / "cache").glob(f"{name}*.safetensors")
    header = int.from_bytes(file.read_bytes()[:8], "little")
    entries = json.loads(file.read_bytes()[8 : 8 + header])
    offset = entries["hidden" if name == "hidden" else "weight"]["data_offsets"][0]
    with file.open("r+b") as stream:
        stream.seek(8 + header + offset)
        stream.write(b"\1")
    cache = TeacherCache(tmp_path / "cache", OPTION, identify(teacher, "auto", False))
    words = "has changed since it was written; remove that file" if name == "hidden" else "is damaged"
    with pytest.raises(InvalidInput, match=rf"{file.name}:? {words}"):
        (cache.hidden(keys(windows.batch(range(7)))), cache.head(torch.device("cpu")))


def test_caches_of_earlier_versions(
    windows: TrainingWindows, online: Online, teacher: Path, tmp_path: Path
) -> None:
    """That of a distillation, whose files had other names and whose manifest knew no device, is read."""
    cache = written(tmp_path / "cache", windows, teacher, online)
    (file,) = (tmp_path / "cache").glob("hidden-*")
    file.rename(file.with_name("hidden-00000.safetensors"))
    (tmp_path / "cache" / "lock").unlink()
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text())
    del manifest["device"]
    earlier = {**manifest, "seq_len": 32, "windows": 7}
    (tmp_path / "cache" / "manifest.json").write_text(json.dumps(earlier))
    identity = identify(teacher, "auto", False)
    given = keys(windows.batch(range(7)))
    assert torch.equal(TeacherCache(tmp_path / "cache", OPTION, identity).hidden(given), cache.hidden(given))


def test_a_larger_padded_teacher_teaches(make_recipe: MakeRecipe, teacher: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3, "head_dim": 12}
    torch.manual_seed(1)
    large = another(teacher, tmp_path / "large", **sizes)
    tensors = weights(large)
    # Padding, which is no token: nothing may depend on it.
    tensors["model.embed_tokens.weight"][258:] = 7.0
    changed = Path(shutil.copytree(large, tmp_path / "changed"))
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    found = []
    for model in (large, changed):
        out = distill(make_recipe(teacher=str(model), output=str(tmp_path / f"{model.name}-out"))).output
        found.append([line["kl"] for line in metrics(out)])
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0]
