"""One run of `kvfold distill` in a process of its own, watched from outside, and killed where that is
wanted.
"""

import fnmatch
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from kvfold.distill.recipe.recipe import Recipe

# What can be seen in a run's directory, in the order in which it can: a name, and the files that tell of it.
MOMENTS = {
    "tokens": "out.partial/tokens.bin.partial",
    "layer": "out.partial/stages/*.stream/layer-*.safetensors",
    "stage": "out.partial/stages/*.partial",
    "teacher": "cache.partial",
    "held-out": "cache/held-out-*.partial",
    "state": "out.partial/state/step-*.partial",
    "best": "out.partial/best/step-*.partial",
    "export": "out.partial/final",
    "end": "out",
}
_SPEED = {"tokens_per_second", "peak_memory_gib"}
_PATIENCE = 0.002  # seconds between two looks
_DEPTH = ("*", "*/*", "*/*/*", "*/*/*/*")  # of the files that are looked at


@dataclass(frozen=True)
class Event:
    """Something that was seen: `name` of MOMENTS, for the `number`th time (from 1)."""

    name: str
    number: int


@dataclass(frozen=True)
class Aim:
    """When to kill: so many seconds after the start, or after an event."""

    seconds: float
    event: Event | None = None

    def told(self) -> str:
        """In words."""
        if self.event is None:
            return f"{self.seconds:.1f} s"
        return f"{self.event.name} {self.event.number} + {1000 * self.seconds:.0f} ms"


@dataclass(frozen=True)
class Seen:
    """What was seen of a run.

    Attributes:
        seconds: that it took.
        events: in order.
        states: hashes of weights and optimizer of every saved step, by the step's directory.
    """

    seconds: float = 0.0
    events: list[Event] = field(default_factory=list)
    states: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def last(self) -> str:
        """The last event in words."""
        return f"{self.events[-1].name} {self.events[-1].number}" if self.events else "nothing"

    def joined(self, later: "Seen") -> "Seen":
        """This and what was seen after it."""
        states = {
            step: self.states.get(step, []) + later.states.get(step, [])
            for step in self.states | later.states
        }
        return replace(later, events=self.events + later.events, states=states)


@dataclass(frozen=True)
class Attempt:
    """A run that has ended: its exit code, the last thing it said, what was seen, where it was."""

    code: int
    said: str
    seen: Seen
    place: Path


def run(recipe: Recipe, place: Path, aim: Aim | None) -> Attempt:
    """Run a recipe in a directory, once; kill it by SIGKILL where an aim is met.

    Args:
        recipe: all of its states are kept, so that they can be seen.
        place: where the output, and a teacher's cache, go; it may hold what an earlier start has left.
        aim: None: it is not killed.
    """
    place.mkdir(exist_ok=True)
    changed: dict[str, Any] = {
        "output": str(place / "out"),
        "save": recipe.save.model_copy(update={"keep": 10**6}),
    }
    changed |= {"teacher_cache": str(place / "cache")} if recipe.teacher_cache else {}
    file = place / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_copy(update=changed).resolved()), encoding="utf-8")
    begun = time.monotonic()
    with (place / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvfold", "distill", str(file)], stdout=said, stderr=said
        )
        seen = _watch(process, place, begun, aim)
    lines = (place / "said").read_text(encoding="utf-8").splitlines()
    return Attempt(
        process.returncode, lines[-1] if lines else "", replace(seen, seconds=time.monotonic() - begun), place
    )


def _watch(process: "subprocess.Popen[bytes]", place: Path, begun: float, aim: Aim | None) -> Seen:
    """Look until a run has ended, or kill it."""
    known, counts = set(_files(place)), dict.fromkeys(MOMENTS, 0)
    events: list[Event] = []
    states: dict[str, list[dict[str, str]]] = {}
    when = begun + aim.seconds if aim and aim.event is None else None
    for path in known:  # an earlier start may have been killed too soon for them to be seen
        _read_state(place / path, states)
    while process.poll() is None:
        now = time.monotonic()
        if when is not None and now >= when:
            process.kill()
            process.wait()
            break
        for path in _files(place):
            if path in known:
                continue
            known.add(path)
            _read_state(place / path, states)
            for name in [name for name, pattern in MOMENTS.items() if fnmatch.fnmatch(path, pattern)]:
                counts[name] += 1
                events.append(Event(name, counts[name]))
                if aim and aim.event == events[-1]:
                    when = now + aim.seconds
        time.sleep(_PATIENCE)
    return Seen(0.0, events, states)


def _files(place: Path) -> list[str]:
    found = []
    for pattern in _DEPTH:
        try:
            found += [str(path.relative_to(place)) for path in place.glob(pattern)]
        except OSError:  # removed while it was being read
            continue
    return found


def _read_state(path: Path, states: dict[str, list[dict[str, str]]]) -> None:
    """Note the hashes of a training state that is whole.

    All but those of progress.json, which names the output.
    """
    if (
        path.name == "manifest.json"
        and fnmatch.fnmatch(path.parent.name, "step-????????")
        and path.parent.parent.name == "state"
    ):
        try:
            hashes = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        states.setdefault(path.parent.name, []).append(
            {name: hashes[name] for name in hashes if name.endswith(".safetensors")}
        )


def differences(whole: Attempt, resumed: Attempt, seen: Seen) -> list[str]:
    """What a run that was killed and gone on with has otherwise than one that was not."""
    one, other = whole.place / "out", resumed.place / "out"
    names = {str(path.relative_to(out)) for out in (one, other) for path in out.rglob("*.safetensors")}
    found = [name for name in sorted(names) if _bytes(one / name) != _bytes(other / name)]
    found += [
        name
        for name, read in (("metrics.jsonl", _metrics), ("curve.json", _bytes))
        if read(one / name) != read(other / name)
    ]
    for step, hashes in sorted(seen.states.items()):
        expected = whole.seen.states.get(step)
        if expected and any(each != expected[0] for each in hashes):
            found.append(f"state {step}")
    missing = whole.seen.states.keys() - seen.states.keys()
    return found + [f"no state {step} was seen" for step in sorted(missing)]


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


def _metrics(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key not in _SPEED} for line in lines]
