"""Threads of a command wait passively where other processes run, and as the user says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
from pathlib import Path

import click

from kvfold.core import waiting
from kvfold.core.console import Command

waiting.LOAD = Path(sys.argv.pop(1))
os.cpu_count = lambda: 4


@click.command(cls=Command)
def main():
    click.echo(str(os.environ.get("OMP_WAIT_POLICY")))


main()
"""


def policy(place: Path, load: str | None, **given: str) -> str:
    """Return the wait policy that a command sees on a machine of four cores with this /proc/loadavg."""
    file = place / "loadavg"
    if load is not None:
        file.write_text(load, encoding="ascii")
    ruled = ("OMP_", "GOMP_", "KMP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ruled)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file)],
        env={**environment, **given},
        capture_output=True,
        check=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("load", "found"),
    [
        ("3.10 2.00 1.00 4/200 999\n", "PASSIVE"),
        ("0.10 2.00 1.00 4/200 999\n", "None"),  # others began this moment
        ("3.10 2.00 1.00 1/200 999\n", "None"),  # others have ended
        ("soon", "None"),
        (None, "None"),  # another system
    ],
)
def test_busy_machines_are_waited_on_passively(tmp_path: Path, load: str | None, found: str) -> None:
    assert policy(tmp_path, load) == found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"OMP_NUM_THREADS": "1"}, "None"),
        ({"OMP_NUM_THREADS": "2"}, "None"),  # of four cores, two of which are free
        ({"OMP_NUM_THREADS": "3"}, "PASSIVE"),
        ({"GOMP_SPINCOUNT": "1000"}, "None"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
    ],
)
def test_the_users_choice_is_kept(tmp_path: Path, given: dict[str, str], found: str) -> None:
    assert policy(tmp_path, "2.20 2.00 1.00 3/200 999\n", **given) == found
