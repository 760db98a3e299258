"""A sample of the cases of `python -m benchmarks.hostile`, and of the stops of `python -m benchmarks.kills`."""

import os
import random
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.hostile import COMMANDS, FILES, Case, cases, run_case
from benchmarks.scene import build, build_others
from kvfold.cli import main

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links, pipes and signals")
PARTS, SAMPLE = 4, 12


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Sound files, and the directory in which they were made and in which cases run."""
    root, here = tmp_path_factory.mktemp("sound"), Path.cwd()
    build(root / "scene")
    build_others(root / "scene")
    (root / "scene").rename(root / "originals")
    yield root / "originals", root / "scene"
    os.chdir(here)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_sample_of_the_cases(sound: tuple[Path, Path], part: int) -> None:
    drawn = random.Random(part).sample(list(cases(400, seed=7)), SAMPLE)
    assert not {case.key: faults for case in drawn if (faults := run_case(case, *sound)[1])}


# Cases that were not right when the fuzzer found them.
FOUND = (
    Case("recipe.yaml", "distill", "outside"),
    Case("cache/manifest.json", "eval cache", "absent"),
    Case("trained.partial/state/step/progress.json", "distill", "pipe"),
    Case("trained.partial/tokens.json", "distill", "outside"),
)


@pytest.mark.parametrize("case", FOUND, ids=lambda case: case.key)
def test_cases_that_were_found(sound: tuple[Path, Path], case: Case) -> None:
    assert run_case(case, *sound)[1] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_undamaged_files_are_accepted(sound: tuple[Path, Path], command: str) -> None:
    """Otherwise the cases would show nothing."""
    assert run_case(Case("", command), *sound) == (0, [])


def test_every_command_that_reads_files_has_cases() -> None:
    asked = {words[0] for words in COMMANDS.values()}
    assert set(main.list_commands(click.Context(main))) - asked == {
        "demo", "engines", "families", "lab", "migrate",
    }  # fmt: skip
    assert {command for commands in FILES.values() for command in commands} == set(COMMANDS)


@pytest.mark.parametrize(
    ("command", "room"), [("convert", 4096), ("convert jsonl", 1), ("distill", 4096), ("report", 65536)]
)
def test_a_full_disk_is_one_sentence(sound: tuple[Path, Path], command: str, room: int) -> None:
    """No file can grow beyond so many bytes."""
    run_case(Case("", "verify"), *sound)  # which lays out the scene
    words = [f"{sound[1]}/{word[1:]}" if word.startswith("@") else word for word in COMMANDS[command]]
    tempfile.gettempdir()  # which is found by writing into it, once for a process
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        done = CliRunner().invoke(main, words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.exit_code == 2, done.output
    assert "make room" in done.stderr or "TMPDIR" in done.stderr
