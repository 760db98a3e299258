"""The frame of the hostile tests: one assertion for everything that a command refuses."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvfold.cli import main

from ..support.commands import run_main
from ..support.tiny import make

GQA = ("--to", "gqa", "--kv-heads", "2")
WEIGHTS = (*GQA, "--calibration", "none")


@dataclass
class Scene:
    """A directory `root` with hostile files for commands, and `canary`, which hostile code would write."""

    root: Path
    canary: Path

    def refused(self, *words: str | Path, says: str = "") -> str:
        """Run a command that must be refused in one sentence with `says`, and leave every file as it is."""
        before = contents(self.root)
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert isinstance(done.exception, SystemExit), f"{words}: {done.exception!r} {done.output}"
        assert not self.canary.exists(), "code of a checkpoint was run"
        assert done.exit_code == 2, f"{words}: {done.exit_code} {done.stderr}"
        assert contents(self.root) == before, "a command that was refused left or changed files"
        lines = done.stderr.splitlines()
        assert [line for line in lines if line.startswith("Error: ")] == lines[-1:], done.stderr
        assert says in lines[-1]
        assert len(lines[-1]) < 2000, "the sentence repeats the file"
        assert lines[-1].isprintable()
        return lines[-1]


def contents(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return what shows a change of any entry of a directory; nothing is opened or followed."""
    about = {str(path.relative_to(root)): path.lstat() for path in sorted(root.rglob("*"))}
    return {name: (found.st_ino, found.st_size, found.st_mtime_ns) for name, found in about.items()}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    root = tmp_path / "scene"
    root.mkdir()
    return Scene(root, tmp_path / "canary")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and a fold of it."""
    root = tmp_path_factory.mktemp("originals")
    source = make(root / "source")
    (source / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    run_main("convert", source, *WEIGHTS, "--out", root / "fold")
    return root


@pytest.fixture
def source(originals: Path, scene: Scene) -> Path:
    return Path(shutil.copytree(originals / "source", scene.root / "source"))


@pytest.fixture
def fold(originals: Path, source: Path, scene: Scene) -> Path:
    return Path(shutil.copytree(originals / "fold", scene.root / "fold"))
