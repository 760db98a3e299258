"""The templates of recipes/launch, with local processes for machines: the bits of a run without a stop."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from kvfold.distill.recipe.recipe import Recipe

from ...support.distillation import metrics, same_bits, weights, write_recipe
from ...support.shown_code import check_words, kvfold_words
from ...support.warm_python import warm_python
from ..conftest import MakeRecipe

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "recipes" / "launch"
PATIENCE = 600.0  # seconds for one launch on a busy machine
MACHINES = 2
# Programs of the clusters, for two machines that are this one.
SRUN = """#!{python}
import os, signal, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--kill-on-bad-exit")]
steps = [
    subprocess.Popen(words, env={{**os.environ, "SLURM_NODEID": str(node)}}) for node in range({machines})
]
signal.signal(signal.SIGTERM, lambda *_: [step.terminate() for step in steps])
sys.exit(max(step.wait() != 0 for step in steps))
"""
SCONTROL = """#!{python}
import os, sys
print("127.0.0.1") if sys.argv[1] == "show" else open(os.environ["QUEUE"], "a").write(sys.argv[1] + "\\n")
"""
# What the templates start, by an interpreter that has its modules imported.
COMMANDS = {"kvfold": "kvfold", "torchrun": "torch.distributed.run"}
COMMAND = """#!/bin/sh
exec "{{warm}}" -m {module} "$@"
"""
SAY = """#!{python}
import json, os, sys
line = json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n"
os.write(1, line.encode())  # at once, since two machines write to one place
"""


def write_programs(folder: Path, programs: Mapping[str, str]) -> None:
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text.format(python=sys.executable, warm=warm_python(), machines=MACHINES))
        (folder / name).chmod(0o755)


def environment(programs: Path, **given: str) -> dict[str, str]:
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **given}


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def kubernetes() -> tuple[dict[str, str], str]:
    """Return the settings of the Kubernetes template and its command."""
    config, _, job = yaml.safe_load_all((TEMPLATES / "kubernetes.yaml").read_text())
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"] == int(config["data"]["NODES"])
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    return config["data"], container["args"][0]


def skypilot() -> tuple[dict[str, Any], str]:
    task = yaml.safe_load((TEMPLATES / "skypilot.yaml").read_text())
    return task["envs"], task["run"]


def on_each_machine(command: str, settings: Sequence[Mapping[str, str]], programs: Path) -> list[Any]:
    """Start a command on every machine, each in a session of its own."""
    return [
        subprocess.Popen(
            ["bash", "-c", command],
            env=environment(programs, **given),
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for given in settings
    ]


def end(processes: Sequence[Any]) -> list[int]:
    """Wait for processes and return their exit codes."""
    for process in processes:
        try:
            process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            kill(processes)
            raise
    return [process.returncode for process in processes]


def kill(processes: Sequence[Any]) -> str:
    """Kill processes with all that they started (launchers begin sessions), and return what they printed."""
    trees = [psutil.Process(process.pid) for process in processes if process.poll() is None]
    for member in [one for tree in trees for one in (tree, *tree.children(recursive=True))]:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    return "\n".join(process.communicate()[0] or "" for process in processes)


def wait_for_step(directory: Path, step: int, processes: Sequence[Any]) -> None:
    """Wait until a step of the run is logged."""
    until = time.monotonic() + PATIENCE
    log = directory / "metrics.jsonl"
    while not (log.exists() and f'"step": {step},' in log.read_text()):
        if time.monotonic() > until or any(process.poll() is not None for process in processes):
            raise AssertionError(f"step {step} was not reached:\n{kill(processes)[-4000:]}")
        time.sleep(0.05)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    commands = {name: COMMAND.format(module=module) for name, module in COMMANDS.items()}
    write_programs(tmp_path / "bin", {"srun": SRUN, "scontrol": SCONTROL, **commands})
    return tmp_path / "bin"


@pytest.fixture
def make_run(
    make_recipe: MakeRecipe, tmp_path: Path, float32_models: dict[str, str]
) -> Callable[[str], Recipe]:
    """A run of sixty steps, long enough to be stopped in the middle."""

    def make(name: str) -> Recipe:
        save = {"every": 4, "keep": 1}
        return make_recipe(output=str(tmp_path / name), tokens=11520, lr=1e-3, save=save, **float32_models)

    return make


def test_a_run_that_is_stopped_and_moves_gives_the_same_bits(
    make_run: Callable[[str], Recipe], programs: Path, tmp_path: Path
) -> None:
    whole = write_recipe(make_run("whole"), tmp_path / "whole.yaml")
    alone = environment(programs, RECIPE=str(whole), FOLDED=str(tmp_path), PROCESSES=str(MACHINES))
    subprocess.run(["bash", TEMPLATES / "torchrun.sh"], env=alone, check=True, capture_output=True)

    moved = write_recipe(make_run("moved"), tmp_path / "moved.yaml")
    partial = tmp_path / "moved.partial"
    given = {"RECIPE": str(moved), "PROCESSES": "1", "PORT": free_port(), "QUEUE": str(tmp_path / "queue")}
    given |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(MACHINES), "SLURM_JOB_NODELIST": "two"}
    job = subprocess.Popen(
        ["bash", TEMPLATES / "slurm-distill.sbatch"],
        env=environment(programs, **given),
        start_new_session=True,
    )
    wait_for_step(partial, 2, [job])
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=PATIENCE) == 0
    assert (tmp_path / "queue").read_text() == "requeue\n"
    assert len(metrics(partial)) < 60

    _, command = skypilot()
    port = free_port()
    settings = [
        {
            "RECIPE": str(moved), "PORT": port, "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
            "SKYPILOT_NUM_NODES": str(MACHINES), "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        }
        for rank in range(MACHINES)
    ]  # fmt: skip
    machines = on_each_machine(command, settings, programs)
    wait_for_step(partial, 9, machines)
    kill(machines)
    assert not (tmp_path / "moved").exists()

    _, command = kubernetes()
    same = {
        "RECIPE": str(moved), "NODES": str(MACHINES), "PROCESSES": "1", "PORT": free_port(),
        "HOST": "127.0.0.1",
    }  # fmt: skip
    pods = on_each_machine(
        command, [{**same, "JOB_COMPLETION_INDEX": str(n)} for n in range(MACHINES)], programs
    )
    assert end(pods) == [0, 0]
    assert same_bits(tmp_path / "whole", tmp_path / "moved")
    assert any(
        (weights(tmp_path / "moved")[name] != tensor).any()
        for name, tensor in weights(make_run("moved").student).items()
    )


def spoken(command: list[str], given: Mapping[str, str], programs: Path, tmp_path: Path) -> list[list[str]]:
    """Return the programs that a template starts, with their arguments, instead of running them."""
    write_programs(tmp_path / "say", dict.fromkeys(("kvfold", "torchrun"), SAY))
    path = f"{tmp_path / 'say'}{os.pathsep}{environment(programs)['PATH']}"
    done = subprocess.run(
        command,
        env={**environment(programs, **given), "PATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("task", [0, 2])
def test_conversion_by_an_array_is_a_right_command(programs: Path, tmp_path: Path, task: int) -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "two"}
    given |= {"SLURM_ARRAY_TASK_ID": str(task)}
    script = ["bash", str(TEMPLATES / "slurm-convert.sbatch")]
    one, other = spoken(script, given, programs, tmp_path)
    assert one == other
    assert one[:5] == ["torchrun", "--nnodes", "2", "--nproc_per_node", "2"]
    words = kvfold_words(shlex.join(one))
    check_words(words)
    assert words[words.index("--out") + 1].endswith(f"-{task}")


def test_the_template_of_one_machine_folds_first(programs: Path, tmp_path: Path) -> None:
    given = {"FOLDED": str(tmp_path / "none")}
    convert, distill = spoken(["bash", str(TEMPLATES / "torchrun.sh")], given, programs, tmp_path)
    for command in (convert, distill):
        words = kvfold_words(shlex.join(command))
        assert words is not None
        check_words(words)
    assert (convert[0], distill[0]) == ("torchrun", "kvfold")


def test_settings_name_shipped_recipes() -> None:
    for name in ("torchrun.sh", "slurm-distill.sbatch"):
        text = (TEMPLATES / name).read_text()
        recipe = text.split("RECIPE:-")[1].split("}")[0]
        assert (ROOT / recipe).is_file(), name
    assert (ROOT / skypilot()[0]["RECIPE"]).is_file()
