"""kvfold where system calls are missing that Linux has."""

import builtins
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kvfold.core import files, system_calls
from kvfold.distill.watch.metrics import peak_memory

from ..support.folds import GQA, convert
from ..support.tiny import make, same_bytes

IMPORT = builtins.__import__
IMPORTS = """
import builtins, importlib, os
usual = builtins.__import__
def without(name, globals=None, *rest, **named):
    if name in {"fcntl", "resource", "pwd", "grp", "termios"} and globals["__name__"].startswith("kvfold"):
        raise ImportError(name)
    return usual(name, globals, *rest, **named)
builtins.__import__ = without
import kvfold
place = os.path.dirname(kvfold.__file__)
for folder, _, files in os.walk(place, followlinks=True):
    parts = ["kvfold", *os.path.relpath(folder, place).split(os.sep)]
    for file in files:
        stem, ending = os.path.splitext(file)
        # A program stands in __main__.py; the kernels need triton, the plugin vllm.
        if ending == ".py" and stem not in {"__main__", "kernels_kvfold"} and "vllm_plugin" not in parts:
            name = ".".join(part for part in (*parts, stem) if part not in {".", "__init__"})
            importlib.import_module(name)
            print(name)
"""


def is_open(path: Path) -> bool:
    """Return whether this process has a file, or one below a directory, open."""
    places = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            places.append(Path(os.readlink(entry)))
        except OSError:  # the listing's own descriptor
            continue
    return any(path == place or path in place.parents for place in places)


def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation on a path that fails while the path is open, as on Windows."""

    def checked(path: Path, *arguments: Any, **options: Any) -> Any:
        if is_open(path.absolute()):
            raise PermissionError(13, "the file is in use", str(path))
        return call(path, *arguments, **options)

    return checked


def without_resource(name: str, given: Any = None, *rest: Any, **named: Any) -> Any:
    """Import a module, unless kvfold asks for `resource`."""
    if name == "resource" and given["__name__"].startswith("kvfold"):
        raise ImportError(name)
    return IMPORT(name, given, *rest, **named)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without the calls that Windows lacks."""
    for name in ("pread", "pwrite", "posix_fallocate"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", without_resource)
    monkeypatch.setattr(system_calls, "SYNCS_DIRECTORIES", False)
    monkeypatch.setattr(files, "MOVES_OPEN_FILES", False)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system does not list open files")
def test_a_fold_needs_none_of_them(
    bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The bytes are the same, although nothing that is open is moved or removed."""
    source = make(tmp_path / "source", num_hidden_layers=4)
    for name in ("unlink", "rename", "replace", "rmdir"):
        monkeypatch.setattr(Path, name, refusing(getattr(Path, name)))
    options = (*GQA, "--jobs", "2", "--shard-size", "20KB")
    convert(source, *options, out=tmp_path / "bare", code=0)
    monkeypatch.undo()
    assert convert(source, *options, out=tmp_path / "usual").exit_code == 0
    assert same_bytes(tmp_path / "bare", tmp_path / "usual") in ([], ["kvfold.json"])
    assert len(load_file(next((tmp_path / "bare").glob("model-00001*")))) > 0


def test_memory_is_measured_without_the_module(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    without = peak_memory()
    monkeypatch.undo()
    assert without > 0.05
    assert without == pytest.approx(peak_memory(), rel=0.9)


def test_every_module_is_imported_without_them() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 200
