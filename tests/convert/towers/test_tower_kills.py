"""A fold of a multimodal checkpoint, killed right before every kind of operation on its files, and resumed."""

import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from benchmarks.interrupted import bits, finish, start
from kvfold.cli import main
from kvfold.core.errors import InvalidInput
from kvfold.core.files import locked

from ...support.quantised import quantise, quantised_tower
from ...support.towers import make_multimodal
from ...support.warm_server import WarmServer

_PRIVATE = re.compile(r"\.kvfold-\w+")
# What is removed once the output has its name is left by a kill, and not resumed.
_STATES = (
    "os.mkdir",
    "os.rename",
    "os.remove out.text.partial",
    "open out.text.partial/m",
    "open .kvfold/out/m",
)
_OTHER = 99  # the exit code of a process whose command ended in another way than by the kill
_SERVER = WarmServer([__name__, "transformers.models.llava.modeling_llava", "kvfold.fold_run"])


def run_and_kill(
    words: Sequence[str], place: Path, known: Sequence[str] | None, told: Path, at: str | None = None
) -> None:
    """Run a command, and kill it before an operation that changes the state of a directory below `place`.

    Args:
        words: of `kvfold`.
        place: the directory.
        known: the kinds of operations that are let pass; None: all but `at`.
        told: a file that gets the kind of operation, or the command's last words.
        at: the kind of operation, where only one counts.
    """

    def hook(operation: str) -> None:
        kind = _PRIVATE.sub(".kvfold", operation)
        if kind == at or (known is not None and kind.startswith(_STATES) and kind not in known):
            told.write_text(kind)
            os.kill(os.getpid(), signal.SIGKILL)

    end = finish(start(words, place, hook, {}), place)
    if end.code not in {0, -signal.SIGKILL}:
        told.write_text(end.said)
    os._exit({0: 0, -signal.SIGKILL: signal.SIGKILL}.get(end.code, _OTHER))


def run_to_the_end(words: Sequence[str], place: Path, told: Path) -> list[str]:
    """Give a command as often as it takes, killed each time before a kind of operation at which it was not yet.

    Args:
        words: of `kvfold`.
        place: the directory that everything is written in.
        told: a file for the processes' words.

    Returns:
        The kinds of operations.
    """
    known: list[str] = []
    code = None
    while code != 0:
        code = _SERVER.run(run_and_kill, words, place, known, told)
        assert code in {0, signal.SIGKILL}, f"exit code {code}: {told.read_text()}, after {known}"
        if code:
            known.append(told.read_text())
    return known


def kill_at(operation: str, words: list[str], place: Path, told: Path) -> None:
    """Run a command in a process that is killed before its first operation of a kind."""
    _SERVER.run(run_and_kill, words, place, None, told, operation)
    assert told.read_text() == operation


def change_text(source: Path) -> None:
    """Change a weight of the text tower."""
    file = source / "model.safetensors"
    tensors = load_file(file)
    name = next(
        name for name in tensors if name.endswith("language_model.model.layers.0.self_attn.o_proj.weight")
    )
    save_file({**tensors, name: tensors[name] + 1}, file, metadata={"format": "pt"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_multimodal(tmp_path / "llava", "llava")


def words(source: Path, out: Path, heads: int = 2) -> list[str]:
    options = ("--to", "gqa", "--kv-heads", str(heads), "--calibration", "none", "--verify", "none")
    return ["convert", str(source), *options, "--out", str(out)]


def test_a_killed_fold_of_a_tower_is_resumed_to_the_same_bits(source: Path, tmp_path: Path) -> None:
    place, clean = tmp_path / "killed", tmp_path / "clean" / "out"
    place.mkdir()
    known = run_to_the_end(words(source, place / "out"), place, tmp_path / "told")
    assert {"os.rename .kvfold/out.tower", "os.rename out.text.partial", "os.rename .kvfold/out"} <= set(
        known
    )
    clean.parent.mkdir()
    assert CliRunner().invoke(main, words(source, clean)).exit_code == 0
    assert bits(place / "out") == bits(clean)
    left = [path for path in place.iterdir() if not path.name.startswith(".kvfold-")]
    assert [path.name for path in left] == ["out"]
    in_private = {path.name for private in place.glob(".kvfold-*") for path in private.iterdir()}
    assert in_private <= {".kvfold-lock"}, "kills leave empty private directories, and nothing in them"


@pytest.mark.parametrize("at", ["open out.text.partial/model.safetensors", "os.mkdir .kvfold/out"])
def test_a_killed_fold_of_a_quantised_tower_is_resumed_to_the_same_bits(
    source: Path, tmp_path: Path, at: str
) -> None:
    quantised = quantise(source, tmp_path / "fp8", quantised_tower("fp8 blocks"))
    place, clean = tmp_path / "killed", tmp_path / "clean" / "out"
    place.mkdir()
    kill_at(at, words(quantised, place / "out"), place, tmp_path / "told")
    clean.parent.mkdir()
    for out in (place / "out", clean):
        again = CliRunner().invoke(main, words(quantised, out))
        assert again.exit_code == 0, again.stderr
    assert bits(place / "out") == bits(clean)
    assert [path.name for path in place.iterdir() if not path.name.startswith(".kvfold-")] == ["out"]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), InvalidInput("no space left")])
def test_a_finished_fold_outlives_a_stop_while_it_is_put_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    """Folding is what takes long: the same command then folds nothing again."""
    place, clean = tmp_path / "stopped" / "out", tmp_path / "clean" / "out"
    for out in (place, clean):
        out.parent.mkdir()
    assert CliRunner().invoke(main, words(source, clean)).exit_code == 0

    def stop(*_: object) -> None:
        raise end

    with monkeypatch.context() as patched:
        patched.setattr("kvfold.convert.towers.whole_checkpoint.put_back", stop)
        assert CliRunner().invoke(main, words(source, place)).exit_code != 0
    monkeypatch.setattr("kvfold.fold_run._fold", stop)
    again = CliRunner().invoke(main, words(source, place))
    assert again.exit_code == 0, again.stderr
    assert bits(place) == bits(clean)
    assert [path.name for path in place.parent.iterdir() if not path.name.startswith(".kvfold-")] == ["out"]


def test_a_finished_part_of_another_fold_is_kept(source: Path, tmp_path: Path) -> None:
    """Neither another request nor a changed source takes it over."""
    place, told = tmp_path / "killed", tmp_path / "told"
    place.mkdir()
    _SERVER.run(run_and_kill, words(source, place / "out"), place, None, told, "os.mkdir .kvfold/out")
    assert told.read_text() == "os.mkdir .kvfold/out"
    before = bits(place)
    refused = CliRunner().invoke(main, words(source, place / "out", heads=1))
    assert refused.exit_code == 2
    words_of = "left by a stopped run of another command, and nothing is overwritten: finish it with `kvfold convert "
    assert words_of in refused.stderr
    assert f"--kv-heads 2 --calibration none --out {place / 'out'}`" in refused.stderr
    weights = next(source.glob("*.safetensors"))
    written = weights.stat().st_mtime_ns
    os.utime(weights, ns=(written, written + 1))
    assert CliRunner().invoke(main, words(source, place / "out")).exit_code == 2
    assert bits(place) == before
    os.utime(weights, ns=(written, written))
    assert CliRunner().invoke(main, words(source, place / "out")).exit_code == 0
    assert not (place / "out.text").exists()


@pytest.mark.parametrize("at", ["os.mkdir out.text.partial", "open out.text.partial/model.safetensors"])
def test_the_tower_of_a_source_that_changed_after_a_kill_is_written_again(
    at: str, source: Path, tmp_path: Path
) -> None:
    place, clean = tmp_path / "killed", tmp_path / "clean"
    place.mkdir()
    clean.mkdir()
    kill_at(at, words(source, place / "out"), place, tmp_path / "told")
    change_text(source)
    for out in (place / "out", clean / "out"):
        done = CliRunner().invoke(main, words(source, out))
        assert done.exit_code == 0, done.stderr
    assert bits(place / "out") == bits(clean / "out")
    assert [path.name for path in place.iterdir() if not path.name.startswith(".kvfold-")] == ["out"]


def test_what_a_killed_fold_of_another_source_left_is_kept(source: Path, tmp_path: Path) -> None:
    place, other = tmp_path / "killed", tmp_path / "other"
    place.mkdir()
    kill_at("open out.text.partial/model.safetensors", words(source, place / "out"), place, tmp_path / "told")
    shutil.copytree(source, other)
    change_text(other)
    before = bits(place)
    refused = CliRunner().invoke(main, words(other, place / "out"))
    assert refused.exit_code == 2
    assert "left by a stopped run of another command" in refused.stderr
    assert bits(place) == before


def test_a_tower_that_stays_is_not_taken_for_that_of_a_changed_source(source: Path, tmp_path: Path) -> None:
    given = [*words(source, tmp_path / "out"), "--text-only"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvfold.fold_run._fold", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        CliRunner().invoke(main, given)
    change_text(source)
    refused = CliRunner().invoke(main, given)
    assert refused.exit_code == 2, refused.output
    assert f"{tmp_path / 'out.tower'} exists and nothing is overwritten" in refused.stderr


def test_a_kill_after_the_last_name_is_cleaned_up_by_the_same_command(source: Path, tmp_path: Path) -> None:
    """The output stays as it is; another command still refuses to write over it."""
    place = tmp_path / "killed"
    place.mkdir()
    kill_at("os.rename out.text", words(source, place / "out"), place, tmp_path / "told")
    visible = sorted(path.name for path in place.iterdir() if not path.name.startswith(".kvfold-"))
    assert visible == ["out", "out.text", "out.tower"]
    before = bits(place / "out")
    refused = CliRunner().invoke(main, words(source, place / "out", heads=1))
    assert refused.exit_code == 2
    assert "out exists and nothing is overwritten" in refused.stderr
    again = CliRunner().invoke(main, words(source, place / "out"))
    assert again.exit_code == 0, again.stderr
    assert "was finished by an earlier run of this command" in again.stderr
    assert bits(place / "out") == before
    visible = sorted(path.name for path in place.iterdir() if not path.name.startswith(".kvfold-"))
    assert visible == ["out"]
    assert CliRunner().invoke(main, words(source, place / "out")).exit_code == 2


@pytest.mark.parametrize("name", ["out.text", "out.tower"])
def test_a_kill_while_a_tower_is_removed_is_cleaned_up_by_any_command(
    name: str, source: Path, tmp_path: Path
) -> None:
    """It was moved into a private directory already, where nobody would look for it."""
    place = tmp_path / "killed"
    place.mkdir()
    kill_at(f"os.remove .kvfold/{name}/config.json", words(source, place / "out"), place, tmp_path / "told")
    assert list(place.glob(f".kvfold-*/{name}/*")) != []
    before = bits(place / "out")
    CliRunner().invoke(main, words(source, place / "out", heads=1))
    assert list(place.glob(".kvfold-*/out.*")) == []
    assert bits(place / "out") == before


def test_another_command_uses_the_tower_of_a_killed_one_and_removes_it(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "killed"
    place.mkdir()
    at = "open out.text.partial/model.safetensors"
    kill_at(at, words(source, place / "out"), place, tmp_path / "told")
    assert (place / "out.tower").is_dir()
    assert CliRunner().invoke(main, words(source, place / "out", heads=1)).exit_code == 0
    visible = sorted(path.name for path in place.iterdir() if not path.name.startswith(".kvfold-"))
    assert visible == ["out"]
    clean = tmp_path / "clean" / "out"
    clean.parent.mkdir()
    assert CliRunner().invoke(main, words(source, clean, heads=1)).exit_code == 0
    assert bits(place / "out") == bits(clean)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    "at", ["open out.text.partial/model.safetensors", "os.mkdir .kvfold/out", "os.rename out.text"]
)
def test_what_a_run_at_work_uses_is_left_to_it(at: str, heads: int, source: Path, tmp_path: Path) -> None:
    """Neither the same command nor another takes it over, however far that run is."""
    place = tmp_path / "working"
    place.mkdir()
    kill_at(at, words(source, place / "out"), place, tmp_path / "told")
    before = bits(place)
    with locked(place / "out.tower" / "lock", None):  # as if it were alive
        refused = CliRunner().invoke(main, words(source, place / "out", heads))
    assert refused.exit_code == 2
    assert f"another kvfold is writing {place / 'out'}; wait for it, or name another --out" in refused.stderr
    assert bits(place) == before


@pytest.mark.parametrize("name", ["out.tower.partial", "out.text.partial", "out.partial"])
def test_a_directory_of_the_user_is_never_touched(name: str, source: Path, tmp_path: Path) -> None:
    """Whatever name a working directory could have."""
    place = tmp_path / "place"
    (place / name).mkdir(parents=True)
    (place / name / "config.json").write_text("mine")
    code = CliRunner().invoke(main, words(source, place / "out")).exit_code
    assert (place / name / "config.json").read_text() == "mine"
    assert code == (2 if name == "out.text.partial" else 0)
