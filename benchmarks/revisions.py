"""Revisions of this repository, each in an environment of its own, for benchmarks that compare two of them.

A revision is extracted by `git archive` into a temporary folder. It gets a virtual environment whose only
.pth file names that folder first and the current site-packages after it. Dependencies are therefore shared,
and kvfold is the revision's: Python reads .pth files of the environment's own site-packages only, so an
editable or other installation of kvfold next to the dependencies cannot supply a module that the revision
lacks, which it could do if PYTHONPATH alone named the folder. `prepare` checks from where kvfold is imported.

With `install` the revision is installed by pip instead, as its users have it (no network: no dependencies, no
build isolation; needs hatchling).
"""

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
WORKING_TREE = "the working tree"
# One thread and no GPU, so that sums are rounded in one order; no network; no kvfold but the environment's.
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__")
_AUTHOR = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "benchmark"), ("EMAIL", "benchmark@localhost"))
}


@dataclass(frozen=True, kw_only=True)
class Revision:
    """A revision that commands can be run with.

    Attributes:
        name: as the user gave it.
        commit: its hash; of the working tree, that of a commit which no branch holds.
        place: folder of everything that belongs to it.
        python: interpreter of its virtual environment.
    """

    name: str
    commit: str
    place: Path
    python: Path

    def run(self, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS` in a folder and return what it printed and its exit code."""
        settings = {**os.environ, **_SETTINGS, "HF_MODULES_CACHE": str(self.place / "modules")}
        for name in _DROPPED:
            settings.pop(name, None)
        return subprocess.run(
            [str(self.python), *arguments], cwd=folder, env=settings, capture_output=True, text=True
        )


def prepare(name: str, place: Path, *, install: bool = False) -> Revision:
    """Make the environment of a revision.

    Args:
        name: anything that git resolves to a commit, or WORKING_TREE.
        place: a folder that does not exist.
        install: install by pip instead of running from the extracted files.

    Raises:
        click.UsageError: git does not know the revision, or it cannot be imported or installed.
    """
    place.mkdir(parents=True)
    commit = _snapshot(place / "index") if name == WORKING_TREE else _resolve(name)
    tree, environment = place / "tree", place / "venv"
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit))) as archive:
        archive.extractall(tree, filter="data")
    venv.create(environment, symlinks=os.name != "nt")
    scheme = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    python = Path(sysconfig.get_path("scripts", "venv", scheme)) / Path(sys.executable).name
    lines = [*([] if install else [str(tree)]), *_site_packages()]
    (packages / "revision.pth").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    made = Revision(name=name, commit=commit, place=place, python=python)
    if install:
        options = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--quiet")
        _check(made, made.run(["-m", "pip", "install", *options, str(tree)], place))
    found = _check(made, made.run(["-c", "import kvfold; print(kvfold.__file__)"], place)).strip()
    if not Path(found).resolve().is_relative_to((packages if install else tree).resolve()):
        raise click.UsageError(f"{name} imports kvfold from {found}, which is not its own")
    return made


def _site_packages() -> list[str]:
    """Return the folders in which this interpreter finds its dependencies."""
    return [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]


def _check(revision: Revision, done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise click.UsageError(
            f"{revision.name} cannot be made ready: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def _resolve(name: str) -> str:
    return _git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}").decode().strip()


def _snapshot(index: Path) -> str:
    """Return a commit of the working tree with all files that git does not ignore.

    Branches and index stay as they are.
    """
    own = Path(_git("rev-parse", "--path-format=absolute", "--git-path", "index").decode().strip())
    if own.exists():
        shutil.copyfile(own, index)  # so that unchanged files are not hashed again
    settings = {"GIT_INDEX_FILE": str(index), **_AUTHOR}
    _git("add", "--all", **settings)
    tree = _git("write-tree", **settings).decode().strip()
    return _git("commit-tree", tree, "-m", WORKING_TREE, **settings).decode().strip()


def _git(*arguments: str, **settings: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, env={**os.environ, **settings}, capture_output=True)
    if done.returncode:
        raise click.UsageError(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout
