"""One directory for all long work: claimed by one run, recorded unit by unit, finished whole, and private."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.core.work import (
    JOURNAL,
    LOCK,
    WorkDir,
    claimed,
    differences,
    discard_finished,
    joined,
    remove_own,
    strangers,
    whole_directory,
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="rights and links")


class Killed(BaseException):
    """As SIGKILL ends a process: nothing is tidied up."""


def begun(path: Path, **units: Any) -> Path:
    """Return a directory that a run was killed in after some units."""
    with suppress(Killed), claimed(path, "test") as work:
        work.begin({"asked": 1})
        work.add(units)
        raise Killed
    return path


def content(directory: Path) -> dict[str, bytes | str | None]:
    """Return every entry of a directory with its bytes, or its target where it is a link."""
    return {
        str(path.relative_to(directory)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(directory.rglob("*"))
    }


def test_units_are_made_once_and_come_back_as_json(tmp_path: Path) -> None:
    path = begun(tmp_path / "out.partial", a={"times": (1, 2.5)}, b=[])
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    with (path / JOURNAL).open("ab") as journal:
        journal.write(b'["c", 1, 5]\n["d", {"cut o')  # a wrong checksum, and a line that was being written
    with claimed(path, "test") as work:
        work.begin({"asked": 1})
        assert work.units == {"a": {"times": [1, 2.5]}, "b": []}
        assert work.unit("a", lambda: pytest.fail("made twice")) == {"times": [1, 2.5]}
        with pytest.raises(ValueError, match="not JSON compliant"):
            work.add({"c": float("nan")})
        (path / "model").mkdir()
        (path / "model" / "config.json").write_text("{}")
        work.finish(path / "model", tmp_path / "out")
    assert content(tmp_path) == {"out": None, "out/config.json": b"{}"}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) != 0o700


def test_another_request_is_refused_and_another_state_begins_anew(tmp_path: Path) -> None:
    path = begun(tmp_path / "out.partial", a=1)
    (path / "config.json").write_text("{}")
    before = content(path)
    words = r"holds 1 finished parts of another command, which differs in asked \(was 1\); give that command"
    with claimed(path, "test", keeps=lambda work: True) as work:
        with pytest.raises(InvalidInput, match=words):
            work.begin({"asked": 2})
        assert content(path) == before
        work.begin({"asked": 1}, "another state")
        assert work.units == {}
        assert set(content(path)) == {JOURNAL, LOCK}
    with pytest.raises(InvalidInput, match="holds an unfinished test; "), claimed(path, "other"):
        pytest.fail("taken")
    with claimed(begun(tmp_path / "none.partial"), "test") as work:
        work.begin({"asked": 2})  # nothing was finished, so nothing would be lost


@pytest.mark.parametrize("request_", [None, 2])
def test_a_refused_run_leaves_the_work_of_another(tmp_path: Path, request_: int | None) -> None:
    path = begun(tmp_path / "out.partial", a=1)
    before = content(path)

    def refused() -> None:
        with claimed(path, "test") as work:
            if request_ is not None:
                work.begin({"asked": request_})
            raise InvalidInput("before anything was begun")

    with pytest.raises(InvalidInput):
        refused()
    assert content(path) == before


def test_one_run_at_a_time_and_its_ranks_share_it(tmp_path: Path) -> None:
    path = tmp_path / "out.partial"
    with claimed(path, "test") as first:
        first.begin({})
        with joined(path, "test", 1) as other:
            other.begin({})
            other.add({"b": 2})
            first.add({"a": 1})
            with pytest.raises(InvalidInput, match="another kvfold is at work in"), claimed(path, "test"):
                pytest.fail("taken")
    alive, keeping = joined(path, "test", 1), claimed(path, "test", keeps=lambda work: True)
    with alive, keeping as again, pytest.raises(InvalidInput, match="another kvfold is at work in"):
        again.begin({})  # a rank of that run is still at work
    with claimed(path, "test") as again:
        again.begin({})
        assert again.units == {"a": 1, "b": 2}
        assert set(content(path)) == {JOURNAL, LOCK}


def test_a_result_with_its_name_leaves_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "e.json.partial", tmp_path / "e.json"
    with monkeypatch.context() as patch, claimed(path, "test") as work:
        work.begin({})
        (path / "eval.json").write_text("{}")
        patch.setattr(WorkDir, "discard", lambda _: [])
        work.finish(path / "eval.json", out)
    assert discard_finished(out)
    assert content(tmp_path) == {"e.json": b"{}"}
    begun(path, a=1)
    assert not discard_finished(out), "it is the work of something else"
    assert path.is_dir()


def test_a_full_disk_is_a_sentence_and_leaves_none(tmp_path: Path) -> None:
    def fill(path: Path) -> None:
        with claimed(path, "test", keeps=lambda work: bool(work.units)) as work:
            work.begin({"asked": 1})
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(InvalidInput, match="cannot be written: No space left on device; make room there and"):
        fill(tmp_path / "new" / "out.partial")
    assert content(tmp_path) == {}
    begun(tmp_path / "out.partial", a=1)
    with pytest.raises(InvalidInput, match="what was finished is kept: make room"):
        fill(tmp_path / "out.partial")
    assert (tmp_path / "out.partial").is_dir()


@pytest.mark.parametrize("rights", [0o755, 0o777, 0o1777])
def test_an_empty_directory_that_others_can_enter_is_not_adopted(tmp_path: Path, rights: int) -> None:
    """Somebody else may have made it, and could put a link there."""
    path = tmp_path / "out.partial"
    path.mkdir()
    path.chmod(rights)
    with (
        pytest.raises(
            InvalidInput, match="it is another user's, or others can write to it; move it, or name"
        ),
        claimed(path, "test"),
    ):
        pytest.fail("taken")
    path.chmod(0o700)
    with claimed(path, "test") as work:
        work.begin({})
    path.chmod(rights)
    if rights & 0o022:
        with pytest.raises(InvalidInput, match="others can write to it"), claimed(path, "test"):
            pytest.fail("taken")


@pytest.mark.skipif(os.name != "nt" and os.getuid() != 0, reason="only root gives a directory away")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    path = begun(tmp_path / "out.partial", a=1)
    os.chown(path, 12345, 12345)
    with pytest.raises(InvalidInput, match="it is another user's"), claimed(path, "test"):
        pytest.fail("taken")


def test_links_are_not_followed(tmp_path: Path) -> None:
    path, precious = begun(tmp_path / "out.partial", a=1), tmp_path / "precious"
    precious.mkdir()
    (precious / "config.json").write_text("mine")
    for name, target in (
        ("model", precious),
        (f"{JOURNAL}.partial", precious / "config.json"),
        ("trackers", precious),
    ):
        (path / name).symlink_to(target)
        with pytest.raises(InvalidInput, match=f"it holds {name}; move it"), claimed(path, "test"):
            pytest.fail("taken")
        (path / name).unlink()
    with claimed(path, "test") as work:
        work.begin({"asked": 1})
        (path / "model").symlink_to(precious)
        (path / JOURNAL).unlink()
        (path / JOURNAL).symlink_to(precious / "config.json")
        with pytest.raises(OSError, match="symbolic links"):
            work.add({"b": 1})
        remove_own(path / "model")
    assert (precious / "config.json").read_text() == "mine"
    (tmp_path / "link.partial").symlink_to(path)
    with (
        pytest.raises(InvalidInput, match="it is not a directory"),
        claimed(tmp_path / "link.partial", "test"),
    ):
        pytest.fail("taken")


def test_a_directory_that_is_exchanged_gets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.partial"
    with claimed(path, "test", keeps=lambda work: True) as work:
        work.begin({})
        path.rename(tmp_path / "elsewhere")
        path.mkdir()
        with pytest.raises(InvalidInput, match="was moved or replaced while it was written"):
            work.add({"a": 1})


def test_a_directory_appears_at_the_end(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "made", "test") as place:
        (place / "config.json").write_text("1")
        assert not (tmp_path / "made").exists()
    assert content(tmp_path) == {"made": None, "made/config.json": b"1"}
    with pytest.raises(InvalidInput, match="exists"), whole_directory(tmp_path / "more", "test") as place:
        (tmp_path / "more").mkdir()  # empty: a plain rename would replace it
    with suppress(Killed), whole_directory(tmp_path / "next", "test") as place:
        (place / "config.json").write_text("half")
        raise Killed
    with whole_directory(tmp_path / "next", "test") as place:
        assert not list(place.iterdir()), "what a killed run left"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "more", "next"]


@pytest.mark.parametrize("files", [
    {"thesis.txt": ""},
    {LOCK: "", "model/thesis.txt": "mine"},
    {LOCK: "mine"},
    {f"{LOCK}/mine": ""},
    {JOURNAL: "mine\n"},
    {"model.safetensors": "mine"},
])  # fmt: skip
def test_somebody_elses_directory_is_refused_untouched(tmp_path: Path, files: dict[str, str]) -> None:
    path = tmp_path / "out.partial"
    path.mkdir(mode=0o700)
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    before = content(path)
    words = "is not unfinished work of this user's kvfold: it h"
    with pytest.raises(InvalidInput, match=words), claimed(path, "test"):
        pytest.fail("taken")
    assert content(path) == before


def test_what_an_earlier_version_left_is_begun_anew_or_read(tmp_path: Path) -> None:
    for reads in (False, True):
        path = tmp_path / f"{reads}.partial"
        path.mkdir()
        for name in (LOCK, "tokens.bin"):
            (path / name).write_text("")
        with claimed(path, "test", reads_earlier=reads) as work:
            work.begin({})
            assert (path / "tokens.bin").exists() == reads


def test_only_our_own_is_removed(tmp_path: Path) -> None:
    path = begun(tmp_path / "out.partial", a=1)
    precious = tmp_path / "precious"
    precious.mkdir()
    for name in ("state/step-1/weights.safetensors", "state/step-1/mine.tex", "trackers/run/any.name"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("")
    (path / "elsewhere").symlink_to(precious)
    strange = {path / "elsewhere", path / "state" / "step-1" / "mine.tex"}
    assert set(strangers(path)) == strange
    WorkDir(path).discard()
    assert {place for place in path.rglob("*") if place.is_symlink() or not place.is_dir()} == strange


def test_differences_are_named() -> None:
    before = {"a": {"b": 1, "c": 2}, "long": "x" * 99, "gone": 1}
    assert differences(before, {"a": {"b": 1, "c": 3}, "long": "y", "new": 1}) == [
        "a.c (was 2)", "long", "new", "gone (was 1)"
    ]  # fmt: skip
