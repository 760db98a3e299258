"""Memory that a run may plan for."""

import pytest
import torch

from kvfold.core.memory import free_bytes


def test_memory_that_torch_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU, torch keeps what a calibration has used, though nothing is in it any more."""
    kept = [600]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 - sum(kept), 1000))
    assert free_bytes() == 850
