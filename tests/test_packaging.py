"""The installed files are those of the repository.

A wheel holds every module, the demo checkpoint and the three commands.
"""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_wheel_is_complete(tmp_path: Path) -> None:
    """Built from a copy of the tracked files, with the setuptools of this environment."""
    pytest.importorskip("setuptools")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    copy = tmp_path / "copy"
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(copy),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(
            next(name for name in names if name.endswith("entry_points.txt"))
        ).decode()
    folders = ("convert", "distill", "eval", "recipes")
    modules = {
        f"kvfold/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")
    }
    modules |= {f"kvfold/{path.name}" for path in (ROOT / "kvfold").glob("*.py")}
    assert modules <= names
    assert {
        f"kvfold/distill/parallel/profiles/{name}.yaml"
        for name in ("cpu", "single", "ddp", "fsdp2", "zero2", "multinode")
    } <= names
    assert {f"kvfold/eval/page/templates/page.{kind}" for kind in ("html", "css", "js")} <= names
    assert {
        "kvfold/recipes/demo/model.safetensors",
        "kvfold/recipes/demo/distill.yaml",
        "kvfold/py.typed",
    } <= names
    assert {line.partition(" =")[0] for line in entry_points.splitlines() if "=" in line} == {
        "kvfold",
        "convert",
        "distill",
    }


def test_commands_are_one_object() -> None:
    """The short forms are the sub-commands themselves, so that options cannot drift apart."""
    from kvfold.cli import main
    from kvfold.convert.cli import main as convert
    from kvfold.distill.cli import main as distill

    assert main.commands["convert"] is convert
    assert main.commands["distill"] is distill
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["convert"] == "kvfold.convert.cli:main"


def test_help_lists_every_command_with_its_whole_purpose() -> None:
    from click.testing import CliRunner

    from kvfold.cli import main

    lines = CliRunner().invoke(main, ["--help"]).output.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == list(main.commands)
    assert all(line.endswith(".") and "..." not in line for line in lines), lines


def test_links_show_type_checkers_the_same_tree() -> None:
    for folder in ("convert", "distill", "eval", "recipes"):
        link = ROOT / "kvfold" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder
