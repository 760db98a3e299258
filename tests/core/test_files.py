"""Files appear whole or not at all, nothing of the user's is touched, and one process holds a lock."""

import os
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvfold.core import files
from kvfold.core.errors import InvalidInput
from kvfold.core.files import (
    check_makeable,
    locked,
    rename_whole,
    replace_text,
    save_whole,
    whole_file,
    write_whole,
)


def test_a_file_appears_at_the_end_and_only_without_an_error(tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    with whole_file(file) as temporary:
        temporary.write_text("whole")
        assert not file.exists()
        assert temporary.parent.parent == tmp_path  # the same file system
    assert file.read_text() == "whole"
    with suppress(KeyError), whole_file(tmp_path / "other") as temporary:
        temporary.write_text("half")
        raise KeyError
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_has_the_rights_that_any_new_file_has(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write_whole(tmp_path / "ours", "")
    rights = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "ours")]
    assert rights[0] == rights[1]


def test_a_place_in_which_something_can_be_made_stays_as_it_is(tmp_path: Path) -> None:
    check_makeable(tmp_path / "e.json")
    check_makeable(tmp_path / "new" / "er" / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc, where nobody can make a directory")
@pytest.mark.parametrize("path", ["/proc/out", "/proc/new/out"])
def test_a_place_in_which_nothing_can_be_made_is_refused(path: str) -> None:
    """Its permissions allow it where the user is root."""
    with pytest.raises(InvalidInput, match=f"cannot write {path}: nothing can be made in /proc"):
        check_makeable(Path(path))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc, where nobody can make a file")
def test_a_file_that_cannot_be_made_is_named_and_no_temporary_one() -> None:
    with pytest.raises(OSError) as caught, whole_file(Path("/proc/page.html")):
        pass
    assert caught.value.filename == "/proc/page.html"


def test_names_that_look_temporary_are_the_users(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    for name in ("e.json.partial", "e.json.new", "e.json.tmp"):
        (tmp_path / name).symlink_to(elsewhere)
    write_whole(tmp_path / "e.json", "report")
    assert elsewhere.read_text() == "mine"
    assert all((tmp_path / name).is_symlink() for name in ("e.json.partial", "e.json.new", "e.json.tmp"))


def test_nothing_is_overwritten_unless_asked(tmp_path: Path) -> None:
    file, elsewhere = tmp_path / "e.json", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    file.symlink_to("nowhere")
    with pytest.raises(InvalidInput, match=r"e\.json exists and nothing is overwritten"):
        write_whole(file, "report")
    file.unlink()
    writing = whole_file(file)
    writing.__enter__().write_text("report")
    file.write_text("mine")  # somebody makes it meanwhile
    with pytest.raises(InvalidInput, match="exists"):
        writing.__exit__(None, None, None)
    assert file.read_text() == "mine"
    file.unlink()
    file.symlink_to(elsewhere)
    write_whole(file, "report", replace=True)
    assert (file.is_symlink(), file.read_text(), elsewhere.read_text()) == (False, "report", "mine")


def test_all_of_a_finished_directory_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in it before it gets its name, and the name afterwards."""
    inner = tmp_path / "partial" / "stages" / "first"
    inner.mkdir(parents=True)
    (inner / "model").touch()
    (inner / "link").symlink_to("nowhere")
    synced = []
    monkeypatch.setattr(files, "sync_path", lambda path: synced.append((path, inner.exists())))
    rename_whole(tmp_path / "partial", tmp_path / "out")
    within = [inner / "model", inner, inner.parent, tmp_path / "partial"]
    assert sorted(synced) == sorted([*((path, True) for path in within), (tmp_path, False)])


def test_inside_our_own_directory_a_killed_runs_file_is_replaced(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    for name in ("notes.json", "x.safetensors"):
        (tmp_path / f"{name}.partial").symlink_to(elsewhere)
    replace_text(tmp_path / "notes.json", "new")
    save_whole({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    assert (tmp_path / "notes.json").read_text() == "new"
    assert load_file(tmp_path / "x.safetensors")["x"].tolist() == [1, 1]
    assert elsewhere.read_text() == "mine"
    assert not list(tmp_path.glob("*.partial"))
    os.link(tmp_path / "notes.json", tmp_path / "linked.json")
    replace_text(tmp_path / "notes.json", "newer")
    assert (tmp_path / "linked.json").read_text() == "new"


HOLDER = """
import sys
import threading
from contextlib import suppress
from pathlib import Path
from kvfold.core.files import locked
with locked(Path(sys.argv[1]), "busy"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_held_by_one_process_and_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(InvalidInput, match=r"^busy here$"), locked(file, "busy here"):
            pytest.fail("two hold it")
        waiting = threading.Timer(0.5, holder.kill)
        waiting.start()
        with locked(file, None):  # waits until the other process ends
            assert holder.wait() < 0
    with locked(file, "busy"):
        assert file.is_file()
    assert file.stat().st_size == 0  # it stays, as the mark of a directory of ours
    with locked(file, "busy"):
        file.unlink()
    assert not file.exists()


def test_a_file_of_the_user_is_not_taken_for_a_lock(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    (tmp_path / "folder").mkdir()
    for name in ("thesis", "link", "folder"):
        with (
            pytest.raises(InvalidInput, match=f"{name} exists and is not a lock of kvfold; move it"),
            locked(tmp_path / name, "busy"),
        ):
            pytest.fail("taken")
    assert (tmp_path / "thesis").read_text() == "years of work"
    assert not (tmp_path / "new").exists()
