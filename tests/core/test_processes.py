"""Several processes of a launcher do what one does: each does its share, and only rank 0 prints and writes."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.cli import main
from kvfold.convert.write import rewrite
from kvfold.core.processes import gather_rows, place, processes, sum_over_ranks, together
from kvfold.core.work import WorkDir

from ..support.tiny import make, same_bytes
from ..support.warm_python import warm_python

# The second process: every command after the other, as a launcher would start it. Its exit codes and whatever
# it says.
OTHER = """
import json, os, sys
from click.testing import CliRunner
from kvfold.convert.cli import main
for port, arguments in json.loads(sys.argv[1]):
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    result = CliRunner(env=launched).invoke(main, arguments)
    print(json.dumps([result.exit_code, result.output]))
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_in_two(commands: list[list[str]], before: str = "") -> list[tuple[Result, int, str]]:
    """The first process's results, and the other's exit codes and outputs; the other runs some code first."""
    ports = [free_port() for _ in commands]
    given = json.dumps(list(zip(ports, commands, strict=True)))
    other = subprocess.Popen([warm_python(), "-c", before + OTHER, given], stdout=subprocess.PIPE, text=True)
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    results = [
        CliRunner(env={**launched, "MASTER_PORT": str(port)}).invoke(main, command)
        for port, command in zip(ports, commands, strict=True)
    ]
    said, _ = other.communicate(timeout=120)
    return [(result, *json.loads(line)) for result, line in zip(results, said.splitlines(), strict=True)]


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """Text of its own (five sequences do not halve), statistics, one output; layer by layer; mistakes."""
    source = make(tmp_path / "source", num_attention_heads=4, num_key_value_heads=2)

    def command(name: str, *options: str) -> list[str]:
        taken = ["--to", "mla", "--rank", "9", "--length", "12", "--save-statistics"]
        places = [str(tmp_path / f"{name}.safetensors"), "--out", str(tmp_path / name)]
        return [str(source), *taken, *places, *options]

    assert CliRunner().invoke(main, command("alone", "--sequences", "5")).exit_code == 0
    whole, layerwise, few, absent = run_in_two(
        [
            command("whole", "--sequences", "5"), command("layerwise", "--sequences", "5", "--layerwise"),
            command("few", "--sequences", "1"), command("absent", "--calibration", "nowhere.txt"),
        ]
    )  # fmt: skip
    alone = Statistics.load(tmp_path / "alone.safetensors")
    for (result, code, said), name in ((whole, "whole"), (layerwise, "layerwise")):
        assert (result.exit_code, code, said) == (0, 0, ""), result.output
        assert "Next: kvfold eval" in result.output
        assert json.loads((tmp_path / name / "kvfold.json").read_text())["calibration"]["tokens"] == 60
        for mine, theirs in zip(
            Statistics.load(tmp_path / f"{name}.safetensors").layers, alone.layers, strict=True
        ):
            for key, tensor in vars(mine).items():
                expected = getattr(theirs, key)
                precision = 1e-5 if tensor.dtype == torch.float64 else 2**-8  # samples are kept in bfloat16
                torch.testing.assert_close(
                    tensor, expected, rtol=0, atol=precision * expected.abs().max().item(), msg=key
                )
    for (result, code, said), sentence in (
        (few, "fewer than the 2 processes"),
        (absent, "nowhere.txt is not none, self"),
    ):
        assert (result.exit_code, code, said) == (2, 2, "")
        assert result.output.count("Error: ") == 1
        assert sentence in result.output
    assert not (tmp_path / "few").exists()
    assert not (tmp_path / "absent").exists()


def test_alone_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with processes():
        assert not torch.distributed.is_initialized()
        assert place() == (0, 1)
    rows = torch.arange(6).view(3, 2)
    assert gather_rows(rows, 3) is rows
    assert sum_over_ranks(rows) is rows
    with pytest.raises(ValueError, match="theirs"), together():
        raise ValueError("theirs")


# A process that stands still at its second layer, once its journal tells of its first.
STOPPED = """
import pathlib, sys, time
from kvfold.convert.write import rewrite
from kvfold.convert.cli import main
fold, folded = rewrite.fold, []
def slow(plan, number):
    while folded and number >= 2:
        if any(f'"layer {folded[0]}"' in file.read_text() for file in pathlib.Path(sys.argv[-1] + ".partial").glob("journal*")):
            print("reached", flush=True)
            time.sleep(60)
    folded.append(number)
    return fold(plan, number)
rewrite.fold = slow
main(sys.argv[1:])
"""


def test_layers_are_shared_by_processes(tmp_path: Path) -> None:
    """Each folds some layers into the same output, whose bytes are those of one process."""
    source = make(tmp_path / "source", num_hidden_layers=5, shard_size="40KB")
    folds: list[list[str]] = [
        [str(source), "--to", *to, "--calibration", "none", "--shard-size", "30KB", "--out"]
        for to in (["mla", "--rank", "24"], ["gqa", "--kv-heads", "2"])
    ]
    for number, command in enumerate(folds):
        assert CliRunner().invoke(main, [*command, str(tmp_path / f"alone{number}")]).exit_code == 0
    broken = make(tmp_path / "broken", num_hidden_layers=5)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.4.self_attn.q_proj.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    *results, (mistaken, code, said) = run_in_two(
        [
            *([*command, str(tmp_path / f"together{number}")] for number, command in enumerate(folds)),
            [str(broken), *folds[0][1:], str(tmp_path / "refused")],
        ]
    )
    for number, (result, its, its_words) in enumerate(results):
        assert (result.exit_code, its, its_words) == (0, 0, ""), result.output
        assert same_bytes(tmp_path / f"alone{number}", tmp_path / f"together{number}") == []
    assert (mistaken.exit_code, code, said) == (2, 2, "")
    assert "model.layers.4.self_attn.q_proj.weight" in mistaken.output
    assert not list(tmp_path.glob("refused*"))


# The second process lets go of its lock slowly.
SLOW = """
import time
from filelock import FileLock, Timeout
release = FileLock.release
FileLock.release = lambda *args, **named: (time.sleep(0.5), release(*args, **named))[1]
"""


def test_files_go_once_every_process_has_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that releases its lock after rank 0 removed the directory's files would make the file again."""
    broken = make(tmp_path / "broken", num_hidden_layers=2)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    discard, free = WorkDir.discard, []

    def check_free(work: WorkDir) -> list[Path]:
        if (work.path / "lock-1").exists():
            try:
                FileLock(work.path / "lock-1").acquire(timeout=0).lock.release()
                free.append(True)
            except Timeout:
                free.append(False)
        return discard(work)

    monkeypatch.setattr(WorkDir, "discard", check_free)
    command = [str(broken), "--to", "mla", "--rank", "24", "--calibration", "none", "--out"]
    ((result, code, _),) = run_in_two([[*command, str(tmp_path / "out")]], SLOW)
    assert (result.exit_code, code) == (2, 2), result.output
    assert free == [True]
    assert not list(tmp_path.glob("out*"))


def test_killed_processes_are_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their finished work is kept, whatever the number of processes that resume."""
    source, out, whole = make(tmp_path / "source", num_hidden_layers=6), tmp_path / "out", tmp_path / "whole"
    command = [str(source), "--to", "mla", "--rank", "24", "--calibration", "none", "--jobs", "1", "--out"]
    assert CliRunner().invoke(main, [*command, str(whole)]).exit_code == 0
    port, started = str(free_port()), []
    for rank in "01":
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        arguments = [warm_python(), "-c", STOPPED, *command, str(out)]
        started.append(
            subprocess.Popen(
                arguments, env={**os.environ, **launched, "MASTER_PORT": port}, stdout=subprocess.PIPE
            )
        )
    for process in started:
        assert process.stdout.readline() == b"reached\n"
    alone = CliRunner().invoke(main, [*command, str(out)])
    assert "another kvfold is at work in" in alone.output
    for process in started:
        process.kill()
        process.communicate()
    told = sorted(path.name for path in (tmp_path / "out.partial").glob("journal*"))
    assert told == ["journal-1.jsonl", "journal.jsonl"]
    shutil.copytree(tmp_path / "out.partial", tmp_path / "other.partial")
    folded: list[int] = []
    fold = rewrite.fold
    monkeypatch.setattr(rewrite, "fold", lambda plan, number: (folded.append(number), fold(plan, number))[1])
    assert CliRunner().invoke(main, [*command, str(out)]).exit_code == 0
    assert folded == [2, 3, 4, 5]
    ((result, code, _),) = run_in_two([[*command, str(tmp_path / "other")]])
    assert (result.exit_code, code) == (0, 0), result.output
    assert len(folded) == 4 + 2
    assert same_bytes(out, whole) == same_bytes(tmp_path / "other", whole) == []
