"""A run on a mixture, part of which its teacher writes, reads the same however it is stopped and shared."""

import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.convert.calibration import self_text
from kvfold.core.console import listening
from kvfold.core.errors import InvalidInput
from kvfold.core.signals import Interrupted
from kvfold.distill.data import token_documents as documents
from kvfold.distill.data.order import TrainingWindows
from kvfold.distill.run import job
from kvfold.distill.run.job import distill

from ...support.distillation import interrupt, metrics, same_bits, write_recipe
from ...support.warm_python import warm_python
from ..conftest import MakeRecipe


def test_the_teacher_writes_once(
    make_recipe: MakeRecipe, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = [{"source": str(text), "weight": 1}, {"source": "self", "weight": 2}]
    data = {"source": mixture, "seq_len": 32, "seed": 7}
    written: list[Tensor] = []
    sample = documents.sample_from

    def sample_and_count(*arguments: Any, **options: Any) -> Tensor:
        written.append(sample(*arguments, **options))
        return written[-1]

    monkeypatch.setattr(documents, "sample_from", sample_and_count)
    heard: set[str] = set()
    with listening(lambda description, done, total: heard.add(description)):
        distill(make_recipe(data=data, output=str(tmp_path / "whole")))
    assert "text by the teacher" in heard
    assert "calibration text" not in heard
    interrupt(make_recipe(data=data), 4)
    assert {path.name for path in (tmp_path / "out.partial").iterdir()} >= {
        "tokens.bin",
        "marks.bin",
        "tokens.json",
    }
    assert len(written) == 2
    assert torch.equal(*written)
    distill(make_recipe(data=data))
    assert len(written) == 2
    assert same_bits(tmp_path / "out", tmp_path / "whole")

    together = make_recipe(data=data, output=str(tmp_path / "together"), tokens=576)
    file = write_recipe(together, tmp_path / "recipe.yaml")
    launch = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run(
        [*launch, "-m", "kvfold.distill", str(file)],
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        check=True,
    )
    distill(make_recipe(data=data, output=str(tmp_path / "short"), tokens=576))
    pairs = zip(metrics(tmp_path / "short"), metrics(tmp_path / "together"), strict=True)
    for (
        alone,
        shared,
    ) in pairs:  # the same text and the same windows: bfloat16 students, so that a step differs by rounding
        assert alone["kl"] == pytest.approx(shared["kl"], rel=1e-3)


def stop_in_batch(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Send this process SIGTERM in the middle of a batch that the teacher writes."""
    begun, go_on = itertools.count(1), self_text._continue

    def write_and_signal(*arguments: Any) -> Iterator[tuple[Tensor, Tensor]]:
        is_last = next(begun) == number
        for at, column in enumerate(go_on(*arguments)):
            if is_last and at == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            yield column

    monkeypatch.setattr(self_text, "_continue", write_and_signal)


def test_text_goes_on_after_the_last_whole_batch(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"source": "self", "seq_len": 32, "seed": 7}
    stores: list[bytes] = []
    open_windows = job.open_windows

    def open_and_store(file: Path, *arguments: Any) -> TrainingWindows:
        stores.append(file.read_bytes())
        return open_windows(file, *arguments)

    monkeypatch.setattr(job, "open_windows", open_and_store)
    for bound in ("_WRITTEN_TOGETHER", "_MOST_ON_CPU"):
        monkeypatch.setattr(documents, bound, 8)  # 61 sequences are eight batches
    distill(make_recipe(data=data, output=str(tmp_path / "whole")))
    written = tmp_path / "out.partial" / "written"
    for stopped, finished in ((4, 3), (3, 5)):
        with monkeypatch.context() as patch:
            stop_in_batch(patch, stopped)
            with pytest.raises(Interrupted, match="what was saved is kept"):
                distill(make_recipe(data=data))
        assert len(list(written.iterdir())) == finished
    damaged, *_, foreign = sorted(written.iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    foreign.rename(foreign.with_name(f"batch-{'0' * 64}.safetensors"))
    with pytest.raises(InvalidInput, match="diverged"):  # a lower rate needs no other text
        distill(make_recipe(data=data, lr=100, weight_decay=100, grad_clip=None, warmup=0))
    assert len(list(written.iterdir())) == 9
    with monkeypatch.context() as patch, listening() as heard:
        stop_in_batch(patch, 1)  # none is begun
        distill(make_recipe(data=data))
    assert "text by the teacher: 8 of 8 batches were written before" in heard.notices
    assert len(set(stores)) == 1
    assert same_bits(tmp_path / "out", tmp_path / "whole")
    assert not written.parent.exists()
