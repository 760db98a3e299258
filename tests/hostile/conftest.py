"""The frame of the hostile tests: one assertion for everything that a command refuses.

`make hostile` sets KVFOLD_HOSTILE=all, which runs more of the property-based cases.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvfold.cli import main
from kvfold.convert.calibration.statistics import LayerStatistics, Statistics

from ..support.tiny import make

IS_THOROUGH = os.environ.get("KVFOLD_HOSTILE") == "all"
GQA = ("--to", "gqa", "--kv-heads", "2")
WEIGHTS = (*GQA, "--calibration", "none")
REFUSED = (2, 3)  # exit codes of a refusal, and of a check that fails


@dataclass
class Scene:
    """A directory with hostile files, and the commands that read them.

    Attributes:
        root: the directory; everything that a command may touch is in it.
        canary: a file that hostile code would write.
        cases: the number of commands that were checked.
    """

    root: Path
    canary: Path
    cases: int = field(default=0)

    def refused(self, *words: str | Path, says: str = "") -> str:
        """Run a command that must be refused, and return its sentence.

        The exit code is 2 or 3, stderr ends with one sentence, there is no traceback, and no file in `root`
        appears, changes or disappears.

        Args:
            words: the arguments of `kvfold`.
            says: a part of the sentence.
        """
        code, sentence = self._run(words)
        assert code in REFUSED, f"{words}: exit code {code}"
        assert says in sentence
        return sentence

    def survived(self, *words: str | Path) -> bool:
        """Run a command on damaged files that may still be good, and return whether it accepted them.

        A command that fails must fail as `refused` says.

        Args:
            words: the arguments of `kvfold`, of a command that writes nothing.
        """
        code, _ = self._run(words)
        return code == 0

    def _run(self, words: tuple[str | Path, ...]) -> tuple[int, str]:
        before = contents(self.root)
        done = CliRunner().invoke(main, [str(word) for word in words])
        self.cases += 1
        assert isinstance(done.exception, SystemExit | None), f"{words}: {done.exception!r}"
        assert "Traceback" not in done.stderr
        assert not self.canary.exists(), "code of a checkpoint was run"
        if done.exit_code == 0:
            return 0, ""
        assert done.exit_code in REFUSED, f"{words}: {done.exit_code} {done.stderr}"
        assert contents(self.root) == before, "a command that was refused left or changed files"
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("Error: ")]
        assert errors == lines[-1:], f"{words}: {done.stderr}"
        assert len(errors[0]) < 2000, "the sentence repeats the file"
        errors[0].encode("utf-8")  # no lone surrogate
        return done.exit_code, errors[0]


def contents(root: Path) -> dict[str, tuple[int, str]]:
    """Return the kind and content of every entry of a directory, without following or opening what is not a
    regular file.
    """
    found = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        content = ""
        if stat.S_ISREG(mode):
            content = str(path.stat().st_size)
            if path.stat().st_size < 2**20:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(mode):
            content = os.readlink(path)
        found[str(path.relative_to(root))] = (stat.S_IFMT(mode), content)
    return found


def edit_json(file: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change a JSON object in a file in place."""
    value = json.loads(file.read_text(encoding="utf-8"))
    change(value)
    file.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    root = tmp_path / "scene"
    root.mkdir()
    return Scene(root, tmp_path / "canary")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, a fold of it, and statistics of it."""
    root = tmp_path_factory.mktemp("originals")
    source = make(root / "source")
    (source / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    done = CliRunner().invoke(main, ["convert", str(source), *WEIGHTS, "--out", str(root / "fold")])
    assert done.exit_code == 0, done.output
    layers = tuple(layer_statistics() for _ in range(2))
    Statistics(layers=layers, tokens=32, calibration="self", seed=0).save(root / "taken.safetensors")
    return root


def layer_statistics() -> LayerStatistics:
    def moment(*shape: int) -> torch.Tensor:
        factor = torch.randn(*shape, dtype=torch.float64)
        return factor @ factor.mT / shape[-1]

    return LayerStatistics(
        input_EE=moment(33, 33),
        query_NHH=moment(8, 8, 8),
        key_fisher=moment(64, 64),
        value_fisher=moment(64, 64),
        query_fisher=moment(8, 8, 8),
        distance_NT=torch.full((8, 16), 1 / 16, dtype=torch.float64),
        output_fisher=moment(32, 32),
        input_BTD=torch.randn(2, 16, 32, dtype=torch.bfloat16),
        output_BTD=torch.randn(1, 16, 32, dtype=torch.bfloat16),
    )


@pytest.fixture
def source(originals: Path, scene: Scene) -> Path:
    return Path(shutil.copytree(originals / "source", scene.root / "source"))


@pytest.fixture
def fold(originals: Path, source: Path, scene: Scene) -> Path:
    return Path(shutil.copytree(originals / "fold", scene.root / "fold"))
