"""Errors of a full disk, in the words of several libraries, become one sentence with a place and an advice."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvfold.core.console import explaining
from kvfold.core.disk import disk_error, disk_sentence, naming
from kvfold.core.errors import InvalidInput
from kvfold.core.files import save_whole, whole_file, write_whole

FULL = "No space left on device"
ERRORS = {
    "python": OSError(errno.ENOSPC, FULL),
    "quota": OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    "a tree": shutil.Error([("a", "b", f"[Errno 28] {FULL}: 'b'")]),
    "safetensors": SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)"),
    "torch": RuntimeError("[enforce fail at inline_container.cc:1] file write failed: File too large"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_names_the_place_and_what_to_do(kind: str) -> None:
    with pytest.raises(InvalidInput) as caught, explaining(), naming("out/model.safetensors"):
        raise ERRORS[kind]
    sentence = str(caught.value)
    assert sentence.startswith("out/model.safetensors cannot be written: ")
    assert sentence.endswith("; make room there and run the same command again")


def test_the_innermost_place_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"^inner cannot"), explaining(), naming("outer"), naming("inner"):
        raise ERRORS["python"]


def test_where_no_place_is_known_the_temporary_directory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/elsewhere")
    found = disk_error(ERRORS["python"])
    assert found is not None
    assert "or a temporary one in /elsewhere (TMPDIR), cannot be written: No space" in disk_sentence(found)
    no_place = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    found = disk_error(RuntimeError(f"Failed to import transformers.x because of: {no_place}"))
    assert found is not None
    assert disk_sentence(found).startswith("/elsewhere (TMPDIR) cannot be written: No space left on device")


def test_other_errors_pass() -> None:
    for error in (RuntimeError("size mismatch"), SafetensorError("header too large"), KeyError("a")):
        with pytest.raises(type(error)) as caught, explaining(), naming("out"):
            raise error
        assert caught.value is error
    with pytest.raises(InvalidInput, match=r"^a: No such file"), explaining(), naming("out"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "a")


def test_a_file_that_cannot_grow_is_not_left(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with (
            pytest.raises(InvalidInput, match=r"whole\.txt cannot be written: File too large; make"),
            explaining(),
        ):
            write_whole(tmp_path / "whole.txt", "abc")
        with (
            pytest.raises(InvalidInput, match=r"a\.safetensors cannot be written: File too large"),
            explaining(),
        ):
            save_whole({"a": torch.ones(9)}, tmp_path / "a.safetensors")
        tensors = {"a": torch.ones(9)}
        with (
            pytest.raises(InvalidInput, match=r"b\.safetensors cannot be written: File too large"),
            explaining(),
            whole_file(tmp_path / "b.safetensors") as temporary,
        ):
            save_file(tensors, temporary)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name for path in tmp_path.iterdir()} <= {"a.safetensors.partial"}
