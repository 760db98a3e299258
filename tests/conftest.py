"""Environment of every test."""

import os
from pathlib import Path

import pytest

# Tiny matrices: threads cost more than they bring, and pytest-xdist runs one process a core already.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def warm_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` run its probe in a forked process; see tests/support/warm_probe.py."""
    from kvfold.verification import fresh_process, verify

    from .support.warm_probe import run_warm

    folder = Path(fresh_process.__file__).parent
    monkeypatch.setattr(verify, "run_apart", lambda script, asked: run_warm(str(folder / script), asked))
