"""Profiles: the number of processes of a run, and what each of them holds.

A profile is a configuration of accelerate in `profiles/`. `kvfold distill RECIPE --profile ddp` becomes
`accelerate launch --config_file .../ddp.yaml -m kvfold.distill RECIPE`.
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Literal

from ...core.console import notice
from ...core.errors import InvalidInput
from ..recipe.recipe import Profile, Recipe

Kind = Literal["cpu", "cuda"]
# Devices on which each profile has run, in tests or by hand, on one GPU at most. Any other gives a notice
# when it is chosen.
TESTED: Mapping[Profile, frozenset[Kind]] = {
    "cpu": frozenset({"cpu"}),
    "single": frozenset({"cpu", "cuda"}),
    "ddp": frozenset({"cpu", "cuda"}),
    "fsdp2": frozenset({"cpu", "cuda"}),
    "zero2": frozenset({"cpu"}),
    "zero3": frozenset({"cpu"}),
    "multinode": frozenset({"cpu"}),
}
_ALONE = ("cpu", "single")  # need no launcher
SHARDED = ("fsdp2", "zero2", "zero3", "multinode")  # models are divided among the processes
_COUNT = "--num_processes"
# Environment variables that tell each launched process which run it is part of.
_ASKED = ("KVFOLD_PROFILE", "KVFOLD_PROCESSES")
_ELSEWHERE = ("--machine_rank", "--main_process_ip")  # needed on each machine in addition to its profile


def is_launched() -> bool:
    """Return whether a launcher has started this process."""
    return "LOCAL_RANK" in os.environ


def check_launched() -> None:
    """Refuse to run as less than `relaunch` asked for: the launcher's arguments may silently undo a profile.

    Raises:
        InvalidInput: the number of processes differs, or models are not divided among them.
    """
    profile, asked = (os.environ.get(name) for name in _ASKED)
    if profile is None or asked is None:
        return
    found = os.environ.get("WORLD_SIZE", "1")
    if found != asked:
        raise InvalidInput(
            f"accelerate started {found} processes, but {_COUNT} asks for {asked}; after -- give only "
            f"{_COUNT} and the places of the machines"
        )
    if profile in SHARDED and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        raise InvalidInput(
            f"the profile {profile} divides models among the processes, but accelerate's arguments disable "
            f"that; after -- give only {_COUNT} and the places of the machines"
        )


def uses_gpu(recipe: Recipe, profile: Profile) -> bool:
    """Return whether a run under a profile finds a GPU and may use it."""
    import torch

    return profile != "cpu" and recipe.device != "cpu" and torch.cuda.is_available()


def relaunch(recipe: Recipe, profile: Profile, extra: Sequence[str], arguments: Sequence[str]) -> None:
    """Become the launcher of the same command under a profile; return only if one process is to run.

    The recipe is checked already, so that mistakes in it are reported once. `extra` is for accelerate's
    launcher, `arguments` are those of `python -m kvfold.distill`.

    Raises:
        InvalidInput: the profile cannot run in this way.
    """
    gpu = uses_gpu(recipe, profile)
    if ("cuda" if gpu else "cpu") not in TESTED[profile]:
        here, known = ("on GPUs", "without GPUs") if gpu else ("without a GPU", "on GPUs")
        notice(
            f"the profile {profile} is untested {here}; it has run {known if TESTED[profile] else 'nowhere'}"
        )
    if profile in _ALONE:
        if extra:
            raise InvalidInput(
                f"the profile {profile} starts no launcher, so {' '.join(extra)} has no effect; leave it out"
            )
        return
    given = _given(extra)
    missing = [option for option in _ELSEWHERE if profile == "multinode" and given[option] is None]
    if missing:
        raise InvalidInput(
            f"the profile multinode needs {' and '.join(missing)} on each machine; give them after --, as in "
            f"-- --num_machines 2 --machine_rank 0 --main_process_ip HOST --num_processes 16"
        )
    count = given[_COUNT]
    if count is None:
        if not gpu or profile == "multinode":
            where = "on all machines together" if profile == "multinode" else "without a GPU"
            raise InvalidInput(
                f"the profile {profile} does not define the number of processes {where}; add -- {_COUNT} N"
            )
        import torch

        count = str(torch.cuda.device_count())
        extra = [_COUNT, count, *extra]
    if not (count.isdecimal() and int(count)):
        raise InvalidInput(f"{_COUNT} is {count!r}; it should be a number of at least 1")
    if gpu and "cuda" in TESTED[profile] and int(count) != 1:
        notice(f"the profile {profile} has run on one GPU, but not yet on several")
    file = resources.files(__package__) / "profiles" / f"{profile}.yaml"
    asked = dict(zip(_ASKED, (profile, str(int(count))), strict=True))
    environment = {**os.environ, **asked, **({} if gpu else {"ACCELERATE_USE_CPU": "true"})}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), *extra]
    os.execve(sys.executable, [*command, "-m", "kvfold.distill", *arguments], environment)


def _given(extra: Sequence[str]) -> dict[str, str | None]:
    """Return the values of options in accelerate's arguments; it accepts options with hyphens too."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    for option in (_COUNT, *_ELSEWHERE):
        parser.add_argument(option, option.replace("_", "-"), dest=option, nargs="?", const="")
    return vars(parser.parse_known_args(extra)[0])
