"""A run on a mixture, part of which its teacher writes.

Stopped, resumed and shared among processes it reads the same.
"""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from kvfold.core.console import listening
from kvfold.core.signals import Interrupted
from kvfold.distill.data import token_documents as documents
from kvfold.distill.run.job import distill

from ...support.distillation import metrics, same_bits, stop_at
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
    with monkeypatch.context() as patch:
        stop_at(patch, 4, signal.SIGTERM)
        with pytest.raises(Interrupted):
            distill(make_recipe(data=data))
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

    file = tmp_path / "recipe.yaml"
    together = make_recipe(data=data, output=str(tmp_path / "together"), tokens=576)
    file.write_text(yaml.safe_dump(together.resolved()), encoding="utf-8")
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
