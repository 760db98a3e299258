"""Memory that a run may plan for, and a memory that is full."""

import weakref

import pytest
import torch

from kvfold.core.errors import InvalidInput
from kvfold.core.memory import enough_memory, free_bytes


def test_memory_that_torch_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU, torch keeps what a calibration has used, though nothing is in it any more."""
    kept = [600]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 - sum(kept), 1000))
    assert free_bytes() == 850


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ..."),
            "the GPU has too little memory (2.00 GiB more were needed); use --jobs 1",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
            "the GPU has too little memory; use --jobs 1",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 64 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "this machine has too little memory (64 bytes more were needed); use --jobs 1",
        ),
    ],
)
def test_a_full_memory_is_one_sentence(error: RuntimeError, sentence: str) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    @enough_memory("use --jobs 1")
    def work() -> None:
        large = torch.ones(3)
        held.append(weakref.ref(large))
        raise error

    with pytest.raises(InvalidInput) as mistake:
        work()
    assert str(mistake.value) == sentence
    assert held[0]() is None, "the error keeps what filled the memory"


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), enough_memory("use --jobs 1"):
        raise RuntimeError("shapes do not match")
