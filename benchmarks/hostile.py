"""Damaged and hostile files, thousands of them: `python -m benchmarks.hostile [--cases N] [--state DIR]`.

Every file that kvfold reads is damaged at random places and replaced by links, pipes and the like; every
command that reads it runs on it. A case is right if it ends by exit code 0 with a result that transformers
loads and that is right, or by 2 or 3 with one sentence; nothing else may change, be left or be run.

Cases run in forked processes, and each is noted in the state directory: the same command resumes there
after a kill, and runs no case twice. `--again` runs the cases anew that were not right. Exit code 3 where one
is not.
"""

import json
import os
import resource
import shutil
import signal
import time
import traceback
from collections import Counter
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import click

from kvfold.core.console import Command, show_table
from kvfold.eval.assertions import Unmet
from kvfold.eval.subject import versions

from .hostile_cases import Case, cases
from .machine import machine, save

PATIENCE = 240  # seconds without a finished case, after which a case counts as endless
CHUNK = 250  # cases of a process; what they leave in its memory goes with it
MEMORY = 12 * 2**30  # bytes that a process may allocate
PLACE = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")


def read_state(file: Path) -> dict[str, dict[str, Any]]:
    """Return the outcomes that are noted, by the cases' keys."""
    found: dict[str, dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else ():
        if line.endswith("\n"):  # the last one may still be written
            row = json.loads(line)
            found[row["key"]] = row
    return found


def note(file: Path, row: dict[str, Any]) -> None:
    """Add an outcome to the state."""
    # Unbuffered, so that rows of two processes do not mix.
    with file.open("ab", buffering=0) as stream:
        stream.write(json.dumps(row).encode() + b"\n")


def work(todo: list[Case], state: Path, scene: Path, originals: Path) -> None:
    """Run cases in this process, and end it."""
    from .hostile_worker import run_case

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    quiet = os.open(state.with_name("output.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(quiet, number)
    for case in todo:
        scene.with_name("current").write_text(case.key, encoding="utf-8")
        note(state, asdict(run_case(case, originals, scene)))
    os._exit(0)


def run_chunk(todo: list[Case], state: Path, scene: Path, originals: Path) -> None:
    """Run cases in a forked process, until all are done or one ends it."""
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            work(todo, state, scene, originals)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    current, seen, since = scene.with_name("current"), "", time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        key = current.read_text(encoding="utf-8") if current.exists() else ""
        if ended:
            break
        if key != seen:
            seen, since = key, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.2)
    if status:
        fault = f"its process ended by {os.waitstatus_to_exitcode(status)}"
        note(state, {"key": key, "code": None, "sentence": "", "faults": [fault], "seconds": 0})


def table(todo: list[Case], found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each file and command: cases, how many were refused, accepted and not right."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for case in todo:
        row = found[case.key]
        kind = "not right" if row["faults"] else "accepted" if row["code"] == 0 else "refused"
        rows.setdefault((case.file, case.command), Counter())[kind] += 1
    return [
        {"file": file, "command": command, "cases": sum(count.values())}
        | {kind: count[kind] for kind in ("refused", "accepted", "not right")}
        for (file, command), count in rows.items()
    ]


@click.command(cls=Command)
@click.option(
    "--cases", "count", default=3000, show_default=True, help="Changes of content, besides replaced files."
)
@click.option("--seed", default=0, show_default=True, help="Of the changes.")
@click.option(
    "--state", type=click.Path(path_type=Path), default=".hostile", show_default=True, help="Directory."
)
@click.option("--processes", default=1, show_default=True, help="Cases that run at once.")
@click.option("--only", default="", help="Only cases whose key holds this text.")
@click.option("--again", is_flag=True, help="Run the cases that were not right once more.")
@click.option("--name", help="Keep the summary in benchmarks/results/NAME.json.")
def main(
    count: int, seed: int, state: Path, processes: int, only: str, again: bool, name: str | None
) -> None:
    """Run kvfold on damaged and hostile files."""
    import torch

    torch.set_num_threads(1)
    state.mkdir(exist_ok=True)
    file = (state / f"cases-{seed}.jsonl").absolute()
    file.touch()
    todo = [case for case in cases(count, seed) if only in case.key]
    if again:
        kept = [row for row in read_state(file).values() if not row["faults"]]
        file.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            try:
                _supervise(todo[number::processes], file)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    command = f"python -m benchmarks.hostile --cases {count} --seed {seed}"
    _conclude(todo, read_state(file), name, command)


def _supervise(todo: list[Case], state: Path) -> None:
    """Make the sound files, and run the cases that are left in forked processes."""
    from . import hostile_sources
    from .hostile_scene import build, extend

    scene = PLACE / f"kvfold-hostile-{os.getpid()}" / "scene"
    originals = scene.with_name("originals")
    begun = time.monotonic()
    try:
        build(scene)
        extend(scene)
        for name in hostile_sources.NAMES:
            hostile_sources.write(scene, name)
        hostile_sources.write_tower(scene)
        scene.rename(originals)
        while left := [case for case in todo if case.key not in read_state(state)]:
            click.echo(f"{len(left)} of {len(todo)} cases left, {time.monotonic() - begun:.0f} s", err=True)
            run_chunk(left[:CHUNK], state, scene, originals)
    finally:
        shutil.rmtree(scene.parent, ignore_errors=True)


def _conclude(todo: list[Case], found: dict[str, dict[str, Any]], name: str | None, command: str) -> None:
    rows = table(todo, found)
    wrong = {case.key: found[case.key]["faults"] for case in todo if found[case.key]["faults"]}
    show_table(
        "Damaged and hostile files",
        ("file", "command", "cases", "refused", "accepted", "not right"),
        [tuple(str(value) for value in row.values()) for row in rows],
    )
    for key, faults in wrong.items():
        click.echo(f"{key}: {faults[0]}")
    if name:
        cpu = sum(found[case.key]["seconds"] for case in todo)
        result = {
            "command": command, "date": date.today().isoformat(),
            "versions": versions(), "machine": machine(), "cases": len(todo), "cpu_seconds": round(cpu),
            "refused": sum(row["refused"] for row in rows), "accepted": sum(row["accepted"] for row in rows),
            "not_right": len(wrong), "by_file_and_command": rows, "faults": wrong,
        }  # fmt: skip
        save(name, result)
    if wrong:
        raise Unmet(f"{len(wrong)} of {len(todo)} cases were not right")


if __name__ == "__main__":
    main()
