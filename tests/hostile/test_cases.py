"""A sample of the cases of `python -m benchmarks.hostile`."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import hostile_sources
from benchmarks.hostile_cases import COMMANDS, FILES, FILLED, OTHER_FILES, RESUMED, SLOW, Case, cases
from benchmarks.hostile_scene import build
from benchmarks.hostile_worker import run_case
from kvfold.cli import main

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links, pipes and signals")
SAMPLE = 32


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Sound files, and the directory in which they were made and in which cases run."""
    root, here = tmp_path_factory.mktemp("sound"), Path.cwd()
    build(root / "scene")
    (root / "scene").rename(root / "originals")
    yield root / "originals", root / "scene"
    os.chdir(here)


@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_the_cases(sound: tuple[Path, Path], part: int) -> None:
    others = {*SLOW, *hostile_sources.commands()}  # the latter read sources that this scene lacks
    quick = [
        case for case in cases(3000, seed=7) if case.command not in others and case.file not in OTHER_FILES
    ]
    drawn = random.Random(part).sample(quick, SAMPLE // 4)
    wrong = {case.key: outcome.faults for case in drawn if (outcome := run_case(case, *sound)).faults}
    assert not wrong


# Cases that were not right when all were run first.
FOUND = (
    Case("remote/config.json", "publish remote", 5),
    Case("remote/config.json", "eval remote", 30),
    Case("taken.safetensors", "plan statistics", 8),
    Case("source/model.safetensors", "convert mla", 10),
    Case("source/tokenizer_config.json", "eval source", 17),
    Case("source/tokenizer_config.json", "convert calibrated", 13),
    Case("cache/manifest.json", "eval cache", 2),
    Case("remote/config.json", "verify remote", 34),
    Case("trained.partial/state/step/progress.json", "resume distill", 0, "pipe"),
    Case("trained.partial/state/step/weights.safetensors", "resume distill", 0, "zeros"),
    Case("trained.partial/state/step/optimizer.safetensors", "resume distill", 1),
    Case("trained.partial/state/step/optimizer.safetensors", "resume forged", 7),
    Case("trained.partial/tokens.bin", "resume distill", 5),
    Case("trained.partial/tokens.bin", "resume distill", 0, "outside"),
    Case("trained.partial/tokens.json", "resume distill", 19),
    Case("out.partial/journal.jsonl", "resume convert", 4),
    Case("source/generation_config.json", "convert gqa", 22),
    Case("sharded/model.safetensors.index.json", "convert sharded", 31),
    Case("cache/manifest.json", "eval cache", 30),
    Case("recipe.yaml", "distill", 10),
    Case("latent/config.json", "eval latent", 7),
    Case("fold", "verify fold", 24, "name"),
)


@pytest.mark.parametrize("case", FOUND, ids=lambda case: case.key)
def test_cases_that_were_found(sound: tuple[Path, Path], case: Case) -> None:
    outcome = run_case(case, *sound)
    assert not outcome.faults, outcome


# Of these, others stand for them, or a test of their own.
ELSEWHERE = {
    "distill",
    "distill stages",
    "migrate",
    "plan statistics",
    "report",
    "api report",
    "api train",
    *SLOW,
}


@pytest.mark.parametrize(
    "command", sorted({*COMMANDS, *RESUMED} - hostile_sources.commands().keys() - ELSEWHERE)
)
def test_undamaged_files_are_accepted(sound: tuple[Path, Path], command: str) -> None:
    """Otherwise the cases would show nothing."""
    outcome = run_case(Case("", command, 0, "sound"), *sound)
    assert outcome.code == 0, outcome
    assert not outcome.faults


# Commands on a disk on which no file may be larger than so many bytes.
FULL = {
    "convert gqa": 4096, "convert kept": 65536, "convert calibrated": 1, "distill": 4096, "eval kept": 1,
    "eval cache": 500, "report plain": 4096, "plan drawn": 500, "migrate": 4096, "api fold": 0, "api train": 1,
    "api report": 65536,
}  # fmt: skip


@pytest.mark.parametrize("command", FULL)
def test_a_full_disk_is_one_sentence(sound: tuple[Path, Path], command: str) -> None:
    outcome = run_case(Case("disk", command, FULL[command], "disk"), *sound)
    assert not outcome.faults, outcome
    assert outcome.code == (0 if command == "eval cache" else 2), outcome  # which writes nothing


def test_every_command_that_reads_files_has_cases() -> None:
    asked = {words[0] for words in COMMANDS.values()}
    assert set(main.commands) - asked == {"demo", "engines", "families", "lab"}
    read = {command for _, commands in (FILES | OTHER_FILES).values() for command in commands}
    assert {*COMMANDS, *RESUMED} <= {*read, *FILLED}
