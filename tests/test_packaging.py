"""The installed files are the repository's: every module, the demo checkpoint and the three commands."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("convert", "distill", "eval", "recipes")  # of the repository, and sub-packages of kvfold


def test_wheel_is_complete(tmp_path: Path) -> None:
    """Built from the tracked files as a system without symbolic links checks them out."""
    pytest.importorskip("hatchling")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    copy = tmp_path / "copy"
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    for folder in FOLDERS:
        (copy / "kvfold" / folder).write_text(f"../{folder}")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "-w", str(tmp_path), str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        programs = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    modules = {f"kvfold/{path.relative_to(ROOT)}" for each in FOLDERS for path in (ROOT / each).rglob("*.py")}
    modules |= {
        str(path.relative_to(ROOT))
        for path in (ROOT / "kvfold").rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }
    assert modules == {name for name in names if name.endswith(".py")}
    assert {
        f"kvfold/distill/parallel/profiles/{name}.yaml"
        for name in ("cpu", "single", "ddp", "fsdp2", "zero2", "multinode")
    } <= names
    assert {f"kvfold/eval/page/templates/page.{kind}" for kind in ("html", "css", "js")} <= names
    demo = "kvfold/recipes/demo"
    assert {f"{demo}/model.safetensors", f"{demo}/distill.yaml", "kvfold/py.typed"} <= names
    scripts = {line.partition(" =")[0] for line in programs.splitlines() if "=" in line}
    assert scripts == {"kvfold", "convert", "distill"}


def test_commands_are_one_object() -> None:
    """The short forms are the sub-commands themselves, so that options cannot drift apart."""
    import click

    from kvfold.cli import main
    from kvfold.convert.cli import main as convert
    from kvfold.distill.cli import main as distill

    assert main.get_command(click.Context(main), "convert") is convert
    assert main.get_command(click.Context(main), "distill") is distill
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["convert"] == "kvfold.convert.cli:main"


def test_help_lists_every_command_with_its_whole_purpose() -> None:
    from click.testing import CliRunner

    from kvfold.cli import COMMANDS, main

    lines = CliRunner().invoke(main, ["--help"]).output.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert all(line.endswith(".") and "..." not in line for line in lines), lines


def test_links_show_type_checkers_the_same_tree() -> None:
    for folder in FOLDERS:
        link = ROOT / "kvfold" / folder
        if link.is_file():
            pytest.skip("git has no symbolic links here")
        assert link.resolve() == ROOT / folder
