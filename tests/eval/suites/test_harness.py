"""lm-evaluation-harness as a part of an evaluation: what is kept, what is resumed, what is refused."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kvfold.core.errors import InvalidInput
from kvfold.eval.cli import main
from kvfold.eval.suites import harness, tasks
from kvfold.models.causal_lm import load

from ...support.commands import run_main
from ...support.task_runs import CPU, run_tasks
from ..conftest import Make

lm_eval = pytest.importorskip("lm_eval", reason="pip install 'kvfold[eval]' for the suite tasks")


def test_what_a_model_scored_is_kept_by_its_hash(
    mha: Path, other: Path, own_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "kept"
    first = run_tasks(mha, other, own_tasks, "kv_one", task_cache=cache)
    assert len(list(cache.iterdir())) == 2
    asked = spy(monkeypatch)
    assert run_tasks(mha, other, own_tasks, "kv_one", task_cache=cache) == first
    assert asked == []
    moved = shutil.copytree(other, tmp_path / "elsewhere")
    assert run_tasks(mha, moved, own_tasks, "kv_one", task_cache=cache) == first
    assert asked == []
    weights = load_file(moved / "model.safetensors")
    save_file(
        {name: value + 0.01 for name, value in weights.items()}, moved / "model.safetensors", {"format": "pt"}
    )
    run_tasks(mha, moved, own_tasks, "kv_one", task_cache=cache)
    assert asked == ["kv_one"]
    run_tasks(mha, other, own_tasks, "kv_one", task_cache=cache, limit=3)
    assert asked == ["kv_one"] * 3
    for file in cache.iterdir():
        file.write_text("{}")
    with pytest.raises(InvalidInput, match="was not written by kvfold or is damaged; move it away"):
        run_tasks(mha, other, own_tasks, "kv_one", task_cache=cache)


def spy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []
    real = harness.run

    def counted(load: Any, name: str, *given: Any, **named: Any) -> Any:
        asked.append(name)
        return real(load, name, *given, **named)

    monkeypatch.setattr(harness, "run", counted)
    return asked


def test_a_stopped_run_goes_on_at_the_task_where_it_stopped(
    mha: Path, other: Path, own_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "eval.json"
    command = [str(mha), "--teacher", str(other), "--suite", "tasks", "--device", "cpu", "--out", str(out)]
    command += ["--tasks", "kv_one,kv_two", "--task-path", str(own_tasks)]
    real = harness.run

    def stop(load: Any, name: str, *given: Any, **named: Any) -> Any:
        if name == "kv_two":
            raise KeyboardInterrupt
        return real(load, name, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(harness, "run", stop)
        assert CliRunner().invoke(main, command).exit_code != 0
    asked = spy(monkeypatch)
    result = run_main(
        "eval", *command, "--assert", "tasks.tasks.kv_one.metrics.acc.student.mean>=0", "--json"
    )
    assert asked == ["kv_two", "kv_two"]
    block = json.loads(result.stdout)["suites"]["tasks"]  # the harness prints nothing between
    assert block == json.loads(out.read_text())["suites"]["tasks"]
    assert list(block["tasks"]) == ["kv_one", "kv_two"]
    assert block["harness"] == lm_eval.__version__


def test_changed_data_is_not_paired_with_what_was_kept(mha: Path, own_tasks: Path) -> None:
    ours = harness.run(lambda: load(mha, CPU), "kv_one", own_tasks, batch_size=8, limit=None, fewshot=None)
    theirs = json.loads(json.dumps(ours).replace("kv_one/8/", "kv_one/8/other"))
    with pytest.raises(InvalidInput, match="kv_one: its data changed since --task-cache was written"):
        tasks._task("kv_one", {"student": ours, "teacher": theirs})


def test_logits_that_are_not_numbers_are_refused(make: Make, own_tasks: Path) -> None:
    broken = make(seed=9)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match="not numbers in document 0 of kv_one"):
        run_tasks(broken, None, own_tasks, "kv_one")


@pytest.mark.parametrize(("names", "sentence"), [
    ("kv_on", "--tasks kv_on: lm-evaluation-harness has no such task; did you mean kv_one"),
    ("qqqqqqq", "--tasks qqqqqqq: .* no such task; --task-path .*own has absent, broken, kv_both, kv_one, "),
    (" , ", "it names no task; write for example mla-core"),
    ("broken", r"--tasks broken: it cannot be loaded \("),
    ("absent", r"--tasks absent: it cannot be loaded \(FileNotFoundError\)"),
])  # fmt: skip
def test_mistakes_are_one_sentence(mha: Path, own_tasks: Path, names: str, sentence: str) -> None:
    one = (own_tasks / "kv_one.yaml").read_text()
    (own_tasks / "broken.yaml").write_text(
        one.replace("kv_one", "broken").replace("output_type: multiple_choice", "output_type: x")
    )
    (own_tasks / "absent.yaml").write_text(one.replace("kv_one", "absent"))
    with pytest.raises(InvalidInput, match=sentence):
        run_tasks(mha, None, own_tasks, names)


def test_places_that_are_none_are_one_sentence(mha: Path, own_tasks: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--task-path .*kv_one\.yaml is not a directory"):
        run_tasks(mha, None, own_tasks / "kv_one.yaml", "kv_one")
    with pytest.raises(InvalidInput, match=r"--task-cache .*kv_one\.yaml is not a directory"):
        run_tasks(mha, None, own_tasks, "kv_one", task_cache=own_tasks / "kv_one.yaml")


def test_the_preset_is_of_tasks_that_the_harness_has() -> None:
    root = Path(lm_eval.__file__).parent / "tasks"
    there = {
        line.removeprefix(prefix).strip()
        for file in [
            *root.glob("*/*.yaml"),
            root / "mmlu/default/_mmlu.yaml",
            root / "super_glue/boolq/default.yaml",
        ]
        for line in file.read_text(encoding="utf-8").splitlines()
        for prefix in ("task:", "group:")
        if line.startswith(prefix)
    }
    names = harness.named(("mla-core", "arc_easy"))
    assert set(names) <= there
    assert (len(names), names[0]) == (8, "arc_easy")
    assert harness.PRIMARY.keys() <= set(names)
