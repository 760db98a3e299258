"""Several processes of a launcher do what one does: each a share, the first one alone speaks and writes."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from kvfold.convert.cli import main
from kvfold.convert.ranks import gather_rows, place, processes, sum_over_ranks, together
from kvfold.convert.statistics import Statistics

from ..tiny import make

# The second process: every command after the other, as a launcher would start it. Its exit codes and whatever it says.
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


def run_in_two(commands: list[list[str]]) -> list[tuple[Result, int, str]]:
    """The first process's results, and the other's exit codes and outputs."""
    ports = [free_port() for _ in commands]
    given = json.dumps(list(zip(ports, commands, strict=True)))
    other = subprocess.Popen([sys.executable, "-c", OTHER, given], stdout=subprocess.PIPE, text=True)
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    results = [
        CliRunner(env={**launched, "MASTER_PORT": str(port)}).invoke(main, command)
        for port, command in zip(ports, commands, strict=True)
    ]
    said, _ = other.communicate(timeout=120)
    return [(result, *json.loads(line)) for result, line in zip(results, said.splitlines(), strict=True)]


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """Text of the source's own (five sequences do not halve), statistics, one output; layer by layer as well; mistakes."""
    source = make(tmp_path / "source", num_attention_heads=4, num_key_value_heads=2)

    def command(name: str, *options: str) -> list[str]:
        taken = ["--to", "mla", "--rank", "9", "--length", "12", "--save-statistics", str(tmp_path / f"{name}.safetensors")]
        return [str(source), *taken, "--out", str(tmp_path / name), *options]

    assert CliRunner().invoke(main, command("alone", "--sequences", "5")).exit_code == 0
    whole, layerwise, few, absent = run_in_two(
        [
            command("whole", "--sequences", "5"),
            command("layerwise", "--sequences", "5", "--layerwise"),
            command("few", "--sequences", "1"),
            command("absent", "--calibration", "nowhere.txt"),
        ]
    )
    alone = Statistics.load(tmp_path / "alone.safetensors")
    for (result, code, said), name in ((whole, "whole"), (layerwise, "layerwise")):
        assert (result.exit_code, code, said) == (0, 0, ""), result.output
        assert "Next: kvfold eval" in result.output
        assert json.loads((tmp_path / name / "kvfold.json").read_text())["calibration"]["tokens"] == 60
        for mine, theirs in zip(Statistics.load(tmp_path / f"{name}.safetensors").layers, alone.layers, strict=True):
            for key, tensor in vars(mine).items():
                expected = getattr(theirs, key)
                precision = 1e-5 if tensor.dtype == torch.float64 else 2**-8  # samples are kept in bfloat16
                torch.testing.assert_close(tensor, expected, rtol=0, atol=precision * expected.abs().max().item(), msg=key)
    for (result, code, said), sentence in ((few, "fewer than the 2 processes"), (absent, "nowhere.txt is not none, self")):
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
