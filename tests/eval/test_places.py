"""The place of weights and hidden states changes no number: one at a time, from a cache, from the disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import Gemma2Config, Gemma2ForCausalLM

from kvfold.core.errors import InvalidInput
from kvfold.eval import stored_teacher
from kvfold.eval import subject as subject_module
from kvfold.eval.cli import main
from kvfold.eval.options import EvalRequest, Options
from kvfold.eval.run import evaluate
from kvfold.eval.subject import Subject
from kvfold.models import teacher_cache
from kvfold.models.causal_lm import Loaded, load
from kvfold.texts.corpus import Text

from ..support.commands import run_main
from ..support.tokenizers import save_tokenizer
from .conftest import SHAPE, Make

WINDOW = {"device": "cpu", "window": 32, "batch_size": 4}
PLAIN = Options(**WINDOW)
SCORED = ("ppl", "fidelity")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints whose weights are loaded, in order."""
    seen: list[str] = []

    def watched(path: Path, options: Options, *, multimodal: bool) -> Loaded:
        seen.append(path.name)
        return load(path, options, multimodal=multimodal)

    monkeypatch.setattr(subject_module, "load", watched)
    return seen


def test_one_at_a_time_gives_the_same_numbers_and_holds_one_model(
    mha: Path, other: Path, make: Make, text: Text, loads: list[str]
) -> None:
    parent = make(seed=5)
    together = evaluate(mha, other, text, PLAIN, parent)
    assert loads == [mha.name, other.name, parent.name]
    loads.clear()
    apart = evaluate(mha, other, text, Options(**WINDOW, one_at_a_time=True), parent)
    assert apart.suites == together.suites
    assert loads[:3] == [parent.name, other.name, mha.name]
    subject = Subject({"student": mha, "teacher": other}, Options(**WINDOW, one_at_a_time=True), text)
    subject.load("student")
    subject.load("teacher")
    assert list(subject._loaded) == ["teacher"]


def test_models_that_do_not_fit_together_are_loaded_apart(
    mha: Path, other: Path, text: Text, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = sum((path / "model.safetensors").stat().st_size for path in (mha, other))
    for free, apart in ((size, False), (size - 1, True)):
        monkeypatch.setattr(subject_module, "free_bytes", lambda free=free: free)
        assert Subject({"student": mha, "teacher": other}, PLAIN, text).one_at_a_time is apart
        assert ("they are loaded one at a time" in caplog.text) is apart
        assert not Subject(
            {"student": mha, "teacher": other}, Options(**WINDOW, one_at_a_time=False), text
        ).one_at_a_time
    # Half-precision weights take twice their size in float32.
    assert not Subject({"student": mha}, PLAIN, text).one_at_a_time


def test_one_process_without_room_lets_all_load_apart(
    mha: Path, other: Path, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that decided by themselves would wait for each other's numbers forever."""
    monkeypatch.setattr(subject_module, "free_bytes", lambda: 2**40)
    for full in (False, True):
        monkeypatch.setattr(subject_module, "from_every", lambda own, full=full: [own, full])
        assert Subject({"student": mha, "teacher": other}, PLAIN, text).one_at_a_time is full


def test_a_teachers_cache_serves_several_students_to_the_bit(
    mha: Path, other: Path, make: Make, text: Text, tmp_path: Path, loads: list[str]
) -> None:
    options = Options(**WINDOW, teacher_cache=tmp_path / "states")
    second = make(seed=6)
    for student in (mha, second):
        loads.clear()
        found = evaluate(student, other, text, options, suites=SCORED)
        assert found.suites == evaluate(student, other, text, PLAIN, suites=SCORED).suites
        assert (loads.count(other.name) == 2) == (student == mha)  # the second student finds the states
    # Of the scored positions; hidden states, not logits.
    assert states_in(tmp_path / "states") == [(19, 31, 32)]


def states_in(directory: Path) -> list[tuple[int, ...]]:
    """Shapes of what the files hold."""
    return [tuple(load_file(file)["hidden"].shape) for file in sorted(directory.glob("hidden-*"))]


def test_a_teachers_cache_goes_on_where_it_was_cut_off(
    mha: Path, other: Path, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, real, ran = Options(**WINDOW, teacher_cache=tmp_path), stored_teacher.last_hidden, []
    monkeypatch.setattr(teacher_cache, "FILE_BYTES", 1)  # a file for each batch
    evaluate(mha, other, text, options, suites=SCORED)
    files = sorted(tmp_path.glob("hidden-*"))
    gone = [next(file for file in files if len(load_file(file)["hidden"]) == size) for size in (4, 3)]
    for file in gone:
        file.unlink()
    graphs = []

    def watched(loaded: Any, ids: torch.Tensor) -> torch.Tensor:
        ran.append(len(ids))
        hidden = real(loaded, ids)
        graphs.extend([True] if hidden.requires_grad else [])
        return hidden

    monkeypatch.setattr(stored_teacher, "last_hidden", watched)
    again = evaluate(mha, other, text, options, suites=SCORED)
    assert ran == [4, 3]  # the batches that are gone
    assert not graphs, "what autograd would need of every layer is not kept"
    assert all(file.is_file() for file in gone)
    assert again.suites == evaluate(mha, other, text, PLAIN, suites=SCORED).suites


def test_a_teachers_cache_serves_a_part_of_its_text(
    mha: Path, other: Path, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(mha, other, text, Options(**WINDOW, teacher_cache=tmp_path), suites=SCORED)
    part = WINDOW | {"max_windows": 3}
    monkeypatch.setattr(stored_teacher, "last_hidden", None)
    found = evaluate(mha, other, text, Options(**part, teacher_cache=tmp_path), suites=SCORED)
    monkeypatch.undo()
    plain = evaluate(mha, other, text, Options(**part), suites=SCORED)
    assert found.fidelity.kl.mean == pytest.approx(plain.fidelity.kl.mean, rel=1e-5)


def test_a_teachers_cache_of_something_else_is_refused(
    mha: Path, other: Path, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = tmp_path / "states"
    evaluate(mha, other, text, Options(**WINDOW, teacher_cache=states), suites=SCORED)
    for teacher, changes, differing in (
        (mha, {}, "teacher"),
        (other, {"dtype": "bfloat16"}, r"dtype \('float32', not 'bfloat16'\)"),
    ):
        with pytest.raises(InvalidInput, match=rf"--teacher-cache {states} was .* {differing}; name another"):
            evaluate(mha, teacher, text, Options(**WINDOW | changes, teacher_cache=states), suites=SCORED)
    (tmp_path / "mine.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(InvalidInput, match=f"--teacher-cache {place} is no cache of a teacher"):
            evaluate(mha, other, text, Options(**WINDOW, teacher_cache=place), suites=SCORED)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(InvalidInput, match=r"the hidden states take [0-9.]+ KB and 1 KB are free"):
        evaluate(mha, other, text, Options(**WINDOW, teacher_cache=tmp_path / "new"), suites=SCORED)


def test_a_teacher_that_is_not_finite_is_found_before_its_states_are_kept(
    mha: Path, make: Make, text: Text, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    broken = make(seed=9)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].fill_(torch.nan)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    sentence = (
        r"the teacher, .*, gives logits that are not finite in window 0; .* that of "
        r"model\.layers\.1\.mlp\.up_proj$"
    )
    with pytest.raises(InvalidInput, match=sentence):
        evaluate(mha, broken, text, Options(**WINDOW, teacher_cache=tmp_path / "states"), suites=SCORED)
    assert not list(tmp_path.rglob("hidden-*"))


def test_a_capped_head_is_kept_with_its_cap(text: Text, tmp_path: Path) -> None:
    paths = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        shape = {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 2.0}
        paths.append(tmp_path / str(seed))
        Gemma2ForCausalLM(Gemma2Config(**SHAPE | shape)).save_pretrained(paths[-1])
        save_tokenizer(paths[-1])
    cached = evaluate(*paths, text, Options(**WINDOW, teacher_cache=tmp_path / "states"), suites=SCORED)
    assert cached.suites == evaluate(*paths, text, PLAIN, suites=SCORED).suites


@pytest.mark.parametrize("extra", [{}, {"one_at_a_time": True}])
def test_weights_on_the_disk_give_the_same_numbers(
    mha: Path, other: Path, text: Text, tmp_path: Path, extra: dict[str, Any]
) -> None:
    place = {"device_map": "auto", "offload_dir": tmp_path / "weights", "cpu_memory": 20_000}
    model = load(mha, Options(**WINDOW, **place)).model
    assert "disk" in set(model.hf_device_map.values())
    assert any(parameter.is_meta for parameter in model.parameters())
    found = evaluate(mha, other, text, Options(**WINDOW, **place, **extra))
    plain = evaluate(mha, other, text, PLAIN)
    assert found.suites == plain.suites


def test_the_command_spreads_weights_as_asked(make: Make, text: Text, tmp_path: Path) -> None:
    # Read as float32: what lies on the disk has another precision than what is used.
    half = make(dtype=torch.bfloat16)
    file = tmp_path / "letters.txt"
    file.write_text(text.joined)
    arguments = f"{half} --text {file} --device cpu --window 32 --batch-size 4 --json".split()
    places = ["--device-map", "auto", "--cpu-memory", "90KB", "--offload-dir", str(tmp_path / "weights")]
    spread = run_main("eval", *arguments, *places)
    assert json.loads(spread.stdout) == json.loads(CliRunner().invoke(main, arguments).stdout)


def test_python_takes_memory_as_a_text() -> None:
    given = {"model": "fold", "text": "stdlib", "device_map": "auto", "cpu_memory": "90KB"}
    request = EvalRequest.read(given)
    assert request.options.cpu_memory == 90_000


def test_one_process_has_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidInput, match=r"--device-map auto uses all devices in one process; .* without"):
        EvalRequest.read({"model": "fold", "text": "stdlib", "device_map": "auto"})
