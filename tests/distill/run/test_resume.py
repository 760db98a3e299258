"""A run that was stopped, however rudely, ends in the same bits as one that was not."""

import errno
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvfold.checkpoints.identity import fingerprint
from kvfold.checkpoints.record import read_record
from kvfold.core.errors import InvalidInput
from kvfold.core.work import WorkDir
from kvfold.distill.run.job import distill
from kvfold.distill.stages import state
from kvfold.distill.stages.state import Progress
from kvfold.distill.watch.metrics import trim_metrics

from ...support.distillation import (
    KILLED,
    STAGES,
    command,
    interrupt,
    metrics,
    refuses,
    same_bits,
    stop_at,
    weights,
    write_recipe,
)
from ...support.warm_python import warm_python
from ..conftest import MakeRecipe


@pytest.fixture
def uninterrupted(make_recipe: MakeRecipe, tmp_path: Path) -> Path:
    distill(make_recipe(output=str(tmp_path / "whole"), stages=STAGES))
    return tmp_path / "whole"


def test_a_resumed_run_gives_the_same(make_recipe: MakeRecipe, tmp_path: Path, uninterrupted: Path) -> None:
    recipe = make_recipe(stages=STAGES, save={"every": 2})
    killed = [warm_python(), "-c", KILLED, str(write_recipe(recipe, tmp_path / "recipe.yaml"))]
    for step in ("3", "8"):  # in the first stage, and again in the second
        assert subprocess.run([*killed, step], check=False).returncode == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
    distill(recipe)
    assert same_bits(tmp_path / "out", uninterrupted)
    mine, theirs = (
        [[line[key] for key in ("step", "kl", "grad_norm", "lr")] for line in metrics(place)]
        for place in (tmp_path / "out", uninterrupted)
    )
    assert mine == theirs


@pytest.mark.parametrize(("step", "signum", "stopped"), [
    (3, signal.SIGTERM, "step 4 of 5 of stage first"),
    (3, signal.SIGINT, "step 4 of 5 of stage first"),
    # In the last step of a stage its sums are formed already.
    (5, signal.SIGTERM, "step 5 of 5 of stage first"),
    (10, signal.SIGTERM, "step 5 of 5 of stage second"),
])  # fmt: skip
def test_a_signal_saves_at_the_next_step(
    make_recipe: MakeRecipe,
    tmp_path: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    signum: int,
    stopped: str,
) -> None:
    file, before = (
        write_recipe(make_recipe(stages=STAGES), tmp_path / "recipe.yaml"),
        signal.getsignal(signum),
    )
    with monkeypatch.context() as patch:
        stop_at(patch, step, signum)
        result = command(file)
    assert result.exit_code == 128 + signum
    assert f"stopped after {stopped}; run the same command again" in result.stderr
    assert signal.getsignal(signum) is before
    assert not (tmp_path / "out").exists()
    result = command(file, "--json")
    assert result.exit_code == 0
    assert f"resuming after step {max(4, step)}" in result.stderr
    assert same_bits(tmp_path / "out", uninterrupted)


def test_a_second_signal_does_not_wait_for_the_step(
    make_recipe: MakeRecipe, tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_recipe(make_recipe(stages=STAGES, save={"every": 2}), tmp_path / "recipe.yaml")
    with monkeypatch.context() as patch:
        for _ in range(2):
            stop_at(patch, 4, signal.SIGINT)
        result = command(file)
    assert (result.exit_code, "stopped by SIGINT; what was saved is kept; run the same" in result.stderr) == (
        130,
        True,
    )
    assert state.saved(tmp_path / "out.partial" / "state")[0].name == "step-00000002"
    assert command(file).exit_code == 0
    assert same_bits(tmp_path / "out", uninterrupted)


def test_a_run_that_was_killed_when_its_output_stood_has_ended(
    make_recipe: MakeRecipe, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, partial = write_recipe(make_recipe(tokens=384), tmp_path / "recipe.yaml"), tmp_path / "out.partial"

    def die(*_: object) -> None:
        (partial / "tokens.bin").unlink()
        raise SystemExit(1)

    with monkeypatch.context() as patch:
        patch.setattr(WorkDir, "discard", die)
        assert command(file).exit_code == 1
    assert refuses("out exists and nothing is overwritten", file, "--set", "stages.0.lr=1e-3")
    assert not partial.exists(), "its output has its name"
    before = (tmp_path / "out" / "model.safetensors").stat()
    for _ in range(2):  # also when there is nothing left to tidy up
        result = command(file, "--json")
        assert (result.exit_code, "out is already complete for this recipe" in result.stderr) == (0, True)
        assert json.loads(result.stdout)["stages"][0]["steps"] == 2
        assert not partial.exists()
    shown = command(file).stdout
    assert "Nothing was trained or written" in shown
    assert "Wrote" not in shown
    assert (tmp_path / "out" / "model.safetensors").stat() == before
    assert refuses("out exists and nothing is overwritten", file, "--set", f"teacher={student}")


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_another_checkpoint_in_the_place_of_a_model_is_refused(
    make_recipe: MakeRecipe, student: Path, teacher: Path, tmp_path: Path, role: str
) -> None:
    for name, directory in (("student", student), ("teacher", teacher)):
        shutil.copytree(directory, tmp_path / name)
    recipe = make_recipe(student=str(tmp_path / "student"), teacher=str(tmp_path / "teacher"))
    interrupt(recipe, 3)
    changed = {name: tensor + 1e-2 for name, tensor in weights(tmp_path / role).items()}
    save_file(changed, tmp_path / role / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=rf"the {role} .* is .* that .*out\.partial was started with; put"):
        distill(recipe)
    shutil.copyfile(
        {"student": student, "teacher": teacher}[role] / "model.safetensors",
        tmp_path / role / "model.safetensors",
    )
    distill(recipe)


def test_damaged_states_fall_back(make_recipe: MakeRecipe, tmp_path: Path, uninterrupted: Path) -> None:
    recipe = make_recipe(stages=STAGES, save={"every": 3, "keep": 2})
    interrupt(recipe, 6)
    states = sorted((tmp_path / "out.partial" / "state").iterdir())
    assert [state.name for state in states] == ["step-00000006", "step-00000007"]
    broken = bytearray((states[1] / "weights.safetensors").read_bytes())
    broken[-1] ^= 1
    (states[1] / "weights.safetensors").write_bytes(broken)
    shutil.copytree(tmp_path / "out.partial", tmp_path / "other.partial")
    distill(recipe)
    assert same_bits(tmp_path / "out", uninterrupted)

    for path in state.saved(tmp_path / "other.partial" / "state"):
        (path / "manifest.json").unlink()
    with pytest.raises(InvalidInput, match=r"no training state .*; remove .*other\.partial to start over"):
        distill(recipe.model_copy(update={"output": str(tmp_path / "other")}))


def test_a_changed_recipe_is_refused_by_names_of_its_keys(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    interrupt(make_recipe(), 3)
    with pytest.raises(
        InvalidInput,
        match=r"differs .* in stages\[0\].lr \(was 0.01\), stages\[0\].weight_decay \(was 0.0\);",
    ):
        distill(make_recipe(lr=1e-3, weight_decay=0.1))
    distill(make_recipe(micro_batch=2, log_every=5))
    assert weights(tmp_path / "out")


def test_a_full_disk_is_told_and_leaves_the_states_before(
    make_recipe: MakeRecipe, tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(stages=STAGES, save={"every": 4})
    write_state = state._write

    def write_or_fail(directory: Path, progress: Progress, *arguments: Any) -> None:
        if progress.total_steps == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_state(directory, progress, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(state, "_write", write_or_fail)
        with pytest.raises(InvalidInput, match=r"state cannot be written: No space left on device; earlier"):
            distill(recipe)
    assert [path.name for path in state.saved(tmp_path / "out.partial" / "state")] == [
        "step-00000005",
        "step-00000004",
    ]
    distill(recipe)
    assert same_bits(tmp_path / "out", uninterrupted)


def test_metrics_that_a_power_failure_took_are_unknown(
    make_recipe: MakeRecipe, tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are written all the same."""
    file = write_recipe(make_recipe(stages=STAGES), tmp_path / "recipe.yaml")
    with monkeypatch.context() as patch:
        stop_at(patch, 8, signal.SIGTERM)
        assert command(file).exit_code == 143
    (tmp_path / "out.partial" / "metrics.jsonl").write_bytes(b"")
    result = command(file)
    assert result.exit_code == 0, result.output
    assert "metrics.jsonl has lost losses of stage first; they are recorded as unknown" in result.stderr
    assert same_bits(tmp_path / "out", uninterrupted)
    found = (read_record(tmp_path / "out") or {})["distill"]
    assert (found["steps"], found["tokens"]) == (10, 1920)
    ends = [stage[end]["kl"] for stage in found["stages"] for end in ("first", "last")]
    assert ends == [None, None, None, metrics(tmp_path / "out")[-1]["kl"]]
    assert result.output.count("unknown") == 2 + 3


def test_metrics_are_on_the_disk_before_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that resumes from the state does not write them again."""
    (tmp_path / "metrics.jsonl").touch()
    done: list[str] = []
    monkeypatch.setattr(state, "sync_path", lambda path: done.append(path.name))
    monkeypatch.setattr(state, "finish", lambda _, final: done.append(final.name))
    state.save(tmp_path / "state", Progress(), state.Gathered(), 1)
    assert done == ["metrics.jsonl", tmp_path.name, "step-00000000"]


def test_metrics_keep_the_lines_of_steps_that_stand(tmp_path: Path) -> None:
    """Damaged lines, cut lines and lines of steps to be done again are not in a resumed run's way."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"half\n7\n{"step": 2}\n{"step": 3}\n{"step": 2')
    trim_metrics(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_restored_state_is_saved_as_it_was(tmp_path: Path) -> None:
    """Byte by byte: a restored optimizer has its moments in the order of the file, a fresh one in its own."""
    torch.manual_seed(0)
    hashes = []
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for number in range(2):
        state.save(tmp_path / str(number), Progress(), state.Gathered(model, optimizer), 1)
        found = state.newest(tmp_path / str(number))
        assert found
        hashes.append(json.loads((found / "manifest.json").read_text()))
        optimizer = torch.optim.AdamW(model.parameters())
        state.restore_optimizer(found, model, optimizer)
    assert hashes[0] == hashes[1]


def test_folds_that_differ_in_one_matrix_are_told_apart(tmp_path: Path) -> None:
    """As two folds of one source do; also where the file begins, ends and has its middle in others."""
    found = []
    for changed in (None, "layers.0.k_proj", "layers.3.k_proj"):
        directory = tmp_path / str(changed)
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        names = [
            "embed",
            *(f"layers.{layer}.{matrix}" for layer in range(4) for matrix in ("down", "k_proj", "up")),
            "norm",
        ]
        save_file(
            {name: torch.full((64, 64), float(name == changed)) for name in names},
            directory / "model.safetensors",
        )
        found.append(fingerprint(directory))
    assert len(set(found)) == 3
    (tmp_path / "None" / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(InvalidInput, match="is truncated, damaged or no safetensors file"):
        fingerprint(tmp_path / "None")


def test_other_safetensors_do_not_change_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    expected = fingerprint(tmp_path)
    header = b'{"a": {"data_offsets": [Infinity, 5]}}'
    (tmp_path / "statistics.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert fingerprint(tmp_path) == expected


def test_stages_without_links(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    distill(make_recipe(stages=STAGES, save={"keep_stages": True}))
    assert (tmp_path / "out" / "stages" / "first" / "model.safetensors").is_file()
