"""Memory that a run may plan for, and a memory that is full."""

import weakref
from pathlib import Path

import pytest
import torch

from kvfold.core.errors import InvalidInput
from kvfold.core.memory import enough_memory, free_bytes, remedy_of
from kvfold.models.load_failures import loading_failures


def test_memory_that_torch_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU, torch keeps what a calibration has used, though nothing is in it any more."""
    kept = [600]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 - sum(kept), 1000))
    assert free_bytes() == 850


@pytest.mark.parametrize(("error", "sentence"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ..."),
     "the GPU has too little memory (2.00 GiB more were needed); use --jobs 1"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
     "the GPU has too little memory; use --jobs 1"),
    (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 64 bytes. Error code 12 (Cannot allocate memory)"
        ),
        "this machine has too little memory (64 bytes more were needed); use --jobs 1",
    ),
    (MemoryError(), "this machine has too little memory; use --jobs 1"),
])  # fmt: skip
def test_a_full_memory_is_one_sentence(error: Exception, sentence: str) -> None:
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


def test_what_filled_the_memory_is_freed_behind_other_errors() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def fill() -> None:
        large = torch.ones(3)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory")

    @enough_memory("use --jobs 1")
    def work() -> None:
        try:
            fill()
        except RuntimeError as error:
            raise RuntimeError("CUDA out of memory, again") from error

    with pytest.raises(InvalidInput):
        work()
    assert held[0]() is None


def test_one_of_several_processes_ends_by_the_error_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it: only their launcher can end them, when it is gone."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with (
        pytest.raises(torch.OutOfMemoryError) as full,
        enough_memory("use --jobs 1"),
        enough_memory("use --jobs 1"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert full.value.__notes__ == ["the GPU has too little memory; use --jobs 1"]


def test_a_memory_that_fills_while_a_model_is_read_is_no_fault_of_its_files(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError), loading_failures(tmp_path, "model"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(InvalidInput, match="the model of"), loading_failures(tmp_path, "model"):
        raise RuntimeError("a shape is wrong")


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), enough_memory("use --jobs 1"):
        raise RuntimeError("shapes do not match")


def test_a_remedy_names_what_is_left_to_do() -> None:
    ways = {"a smaller --window": True, "--jobs 1": False, "--layerwise": True}
    assert remedy_of(ways, "a GPU with more memory") == "use a smaller --window or --layerwise"
    assert remedy_of({"--jobs 1": False}, "a GPU with more memory") == "use a GPU with more memory"
