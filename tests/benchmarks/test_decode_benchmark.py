"""`python -m benchmarks.decode`: one object with the numbers that it promises, of every kind of model.

Refusals. Graphs of `benchmarks.kernels`.
"""

import gc
import json
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch
from click.testing import CliRunner

from benchmarks import kernels
from benchmarks.decode import main

TINY = [
    "--heads",
    "2",
    "--head-dim",
    "8",
    "--rank",
    "8",
    "--rope",
    "4",
    "--layers",
    "2",
    "--context",
    "16",
    "--rounds",
    "3",
]
ALL = [word for kind in ("mha", "expanded", "absorbed", "remote", "intact") for word in ("--kind", kind)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_object(dtype: str) -> None:
    result = CliRunner().invoke(
        main, [*TINY, *ALL, "--dtype", dtype, "--batch", "2", "--json"], catch_exceptions=False
    )
    found = json.loads(result.stdout)
    assert (found["context"], found["batch"], found["layers"], found["rounds"]) == (16, 2, 2, 3)
    for fast in ("", "remote_"):
        for slow in ("mha", "expanded"):
            assert found[f"{fast}attention_speedup_vs_{slow}"] > 0
    for spent in found["ms_per_token"].values():
        assert 0 < spent["cache"] + spent["projections"] < spent["attention"] < spent["step"]
        assert spent["core"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--context", "0"], "context"),
        (["--rope", "3"], "--rope 3 is odd"),
        (["--memory-gb", "0.000001"], "need .* GB in addition to the weights"),
        (["--kind", "mla"], "'mla' is not one of"),
    ],
)
def test_bad_input(options: list[str], words: str) -> None:
    result = CliRunner().invoke(main, [*TINY, *options])
    assert result.exit_code == 2
    assert result.exception is not None
    assert re.search(words, result.output), result.output


def test_a_replayed_graph_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph does not, and the next recording frees what nobody keeps: an illegal access on an H200."""
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())

    def record() -> tuple[Callable[[], float], weakref.ref[torch.Tensor]]:
        read = torch.zeros(3)
        return kernels.replayed(lambda: read.sum()), weakref.ref(read)

    run, kept = record()
    gc.collect()
    assert kept() is not None
    del run
    gc.collect()
    assert kept() is None
