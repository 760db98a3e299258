"""Every command, stopped at every kind of moment and given again: `python -m benchmarks.kills [--kills N]`.

Each command runs once without interruption. Then it is stopped, given again until it ends, and what it wrote
is compared with the first run bit for bit. It is stopped by SIGKILL, SIGTERM or a full disk before one of its
operations on files (spread over all of them), and by a signal from outside at random moments. Publishing, to
a server on localhost, is stopped before its requests. Then two runs have one output at once, and a file
system that is too small fills and is enlarged. A stranger's file next to the output must stay as it is.

Exit code 3 where anything differs, is left behind or is told in more than one sentence.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import click

from kvfold.core.console import Command, show_table
from kvfold.eval.assertions import Unmet
from tests.support.hub_server import Hub, serving

from .interrupted import End, bits, counting, finish, start, stop_after, stopping
from .machine import RESULTS, save

FOREIGN = ("mine.txt", "out.partial.mine", "e.json.new")
FULL = ("o space left", " is full")  # in the sentences of a full disk
_OURS = (".kvfold-",)  # private directories, of which a kill leaves those that hold nothing but a lock


class Place:
    """The inputs, the directory that commands write into, and the commands by name.

    Args:
        root: a directory on a file system with room.
        hub: the server that publishing uses.
    """

    def __init__(self, root: Path, hub: Hub) -> None:
        from .scene import (
            CALIBRATED,
            EVALUATED,
            GQA,
            LOSSLESS,
            TOWER,
            build,
            build_others,
            recipe_of_all_stages,
        )

        self.inputs, self.work, self.hub = root / "inputs", root / "work", hub
        build(self.inputs)
        build_others(self.inputs)
        for name in ("out.partial", "trained.partial", "e.json.partial"):
            path = self.inputs / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        recipe = recipe_of_all_stages(self.inputs, self.work)
        source, sharded = str(self.inputs / "source"), str(self.inputs / "sharded")
        text, fold, out = str(self.inputs / "text.txt"), str(self.inputs / "fold"), str(self.work / "out")
        taken = ("--calibration", str(self.inputs / "text.jsonl"), *CALIBRATED)
        kept = ("--save-statistics", str(self.work / "taken.safetensors"))
        shards = ("--shard-size", "20KB")
        self.commands: dict[str, tuple[str, ...]] = {
            "convert": ("convert", sharded, *GQA, *LOSSLESS, *shards, "--out", out),
            "convert, statistics kept": ("convert", source, *GQA, *taken, *kept, *shards, "--out", out),
            "convert, layer by layer": ("convert", source, *GQA, *taken, "--layerwise", *kept, "--out", out),
            "convert, two processes": ("convert", source, *GQA, *taken, *shards, "--out", out),
            "distill": ("distill", str(recipe)),
            "assemble": (
                "assemble", str(self.inputs / TOWER), str(self.inputs / "llava"), *shards, "--out", out,
            ),
            "eval": ("eval", fold, "--text", text, *EVALUATED, "--out", str(self.work / "e.json")),
            "report": ("report", fold, str(self.inputs / "distilled"), "--out", f"{self.work}/page.html"),
            "migrate": (
                "migrate", source, "--to", "gqa", "--until", "ppl<9x", "--steps", "50%,25%", "--text", text,
                "--train", str(self.inputs / "text.jsonl"), "--tokens-per-step", "64", "--window", "16",
                "--max-windows", "2", "--sequences", "2", "--refine", "0", "--set", "evaluate=null",
                "--out", out,
            ),
        }  # fmt: skip

    def lay_out(self) -> None:
        """Empty the working directory, apart from what a stranger has there."""
        for path in self.work.iterdir() if self.work.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.work.mkdir(exist_ok=True)
        for name in FOREIGN:
            (self.work / name).write_text(f"{name} is mine")

    def run(self, name: str, hook: Callable[[str], None] | None = None) -> list[int]:
        """Start a command; return its processes, of which the first is rank 0."""
        words = self.commands[name]
        if "two processes" not in name:
            return [start(words, self.work, hook, {})]
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        ranks = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
        first = start(words, self.work, hook, ranks[0])
        return [first, start(words, self.work.with_name("rank-1"), None, ranks[1])]  # its words are its own

    def end(self, children: list[int]) -> End:
        """Wait for a command as a launcher does: if one process is killed, the others are."""
        ended = finish(children[0], self.work)
        for child in children[1:]:
            if ended.code < 0:
                os.kill(child, signal.SIGKILL)
            finish(child, self.work.with_name("rank-1"))
        return ended

    def written(self) -> dict[str, str]:
        """Return the bits of what commands have written, without private directories and locks of a kill."""
        found = bits(self.work)
        return {name: value for name, value in found.items() if not name.startswith(_OURS)}


def _free_port() -> int:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def whole(place: Place, name: str) -> tuple[dict[str, str], list[str], float]:
    """Run a command without interruption: what it writes, its operations on files, and its seconds."""
    place.lay_out()
    operations = place.inputs / "operations"
    operations.unlink(missing_ok=True)
    begun = time.monotonic()
    ended = place.end(place.run(name, counting(operations)))
    assert ended.code == 0, (name, ended)
    return place.written(), operations.read_text(encoding="utf-8").splitlines(), time.monotonic() - begun


def stop_once(place: Place, name: str, expected: Any, stop: Callable[[], End], told: str) -> dict[str, Any]:
    """Stop a command, give it again until it ends, and compare."""
    place.lay_out()
    ended = stop()
    starts, faults = 1, []
    if ended.code not in (0, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, 2):
        faults.append(f"exit code {ended.code}: {ended.said}")
    if ended.code == 2 and not any(words in ended.said for words in FULL):
        faults.append(f"another sentence: {ended.said}")
    again = ended
    while again.code != 0 and place.written() != expected and starts < 4:
        again, starts = place.end(place.run(name)), starts + 1
    if again.code != 0 and place.written() == expected:  # it was stopped when its output had its name
        again, starts = place.end(place.run(name)), starts + 1
        if again.code != 0 and "exists" not in again.said:
            faults.append(f"all is written, and another start says: {again.said}")
    found = place.written()
    if found != expected:
        names = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
        faults.append(f"differs in {', '.join(names)[:300]}")
        if again.code != 0:
            faults.append(f"does not resume: {again.said}")
    return {"command": name, "stopped": told, "ended": ended.code, "starts": starts, "faults": faults}


def stops(place: Place, name: str, count: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    """Stop a command so many times, and yield a row for each."""
    expected, operations, seconds = whole(place, name)
    for number in range(count):
        means = ("SIGKILL", "SIGTERM", "moment", "full disk")[number % 4]
        if means == "moment":
            wait = seconds * draw.random()

            def at_moment(wait: float = wait) -> End:
                children = place.run(name)
                stop_after(children[0], wait, draw)
                return place.end(children)

            yield stop_once(place, name, expected, at_moment, f"at {wait:.2f} s")
            continue
        at = (number * len(operations) + draw.randrange(len(operations))) // count
        hook = stopping(at, means)
        told = f"{means} before {operations[at]}"
        yield stop_once(place, name, expected, lambda hook=hook: place.end(place.run(name, hook)), told)


def two_at_once(place: Place, name: str) -> dict[str, Any]:
    """Start a command while another process with the same output is at work, and let both end."""
    expected, operations, _ = whole(place, name)
    place.lay_out()
    first = place.run(name, stopping(max(1, len(operations) // 2), "pause"))[0]
    os.waitpid(first, os.WUNTRACED)  # it has stopped half way
    second = start(place.commands[name], place.work.with_name("second"), None, {})
    refused = finish(second, place.work.with_name("second"))
    os.kill(first, signal.SIGCONT)
    ended = finish(first, place.work)
    faults = []
    # The second may end before the first has claimed the output.
    loser = ended if refused.code == 0 else refused
    if {ended.code, refused.code} != {0, 2} or not loser.said.startswith("Error: "):
        faults = [
            f"the first ended by {ended.code}: {ended.said}",
            f"the second by {refused.code}: {refused.said}",
        ]
    if place.written() != expected:
        faults.append("differs")
    return {"command": name, "stopped": "two at once", "ended": refused.code, "starts": 2, "faults": faults}


def small_disk(place: Place, name: str, draw: random.Random) -> dict[str, Any] | None:
    """Run a command on a file system that is too small, then on it with room; None without mounts."""
    expected, _, _ = whole(place, name)
    needed = sum(path.stat().st_size for path in place.work.rglob("*") if path.is_file())
    place.lay_out()
    size = 4096 * max(8, int(needed * draw.uniform(0.2, 0.8)) // 4096)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place.work)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        return None
    try:

        def fill_and_free() -> End:
            ended = place.end(place.run(name))
            subprocess.run(["mount", "-o", "remount,size=1g", place.work], check=True)
            return ended

        return stop_once(place, name, expected, fill_and_free, f"a disk of {size:,} bytes")
    finally:
        place.lay_out()
        subprocess.run(["umount", place.work], check=True)


def publications(place: Place, count: int) -> Iterator[dict[str, Any]]:
    """Kill a publication at its requests, and publish again."""
    words = ("publish", str(place.inputs / "fold"), "org/tiny", "--verify", "lint")

    def publish(kill_at: int | None) -> tuple[End, int]:
        place.lay_out()
        seen = [0]
        child = 0
        ready = threading.Event()

        def fault(method: str, path: str) -> None:
            seen[0] += 1
            if kill_at is not None and seen[0] == kill_at:
                ready.wait()
                os.kill(child, signal.SIGKILL if kill_at % 2 else signal.SIGTERM)
                time.sleep(0.05)

        place.hub.fault = fault
        child = start(words, place.work, None, {})
        ready.set()
        return finish(child, place.work), seen[0]

    def reset() -> None:
        place.hub.repositories.clear()
        place.hub.objects.clear()

    reset()
    ended, requests = publish(None)
    assert ended.code == 0, ended
    expected = place.hub.repositories["org/tiny"].files
    for number in range(count):
        reset()
        at = 1 + number * requests // count
        ended, _ = publish(at)
        again, faults = publish(None)[0], []
        if again.code != 0:
            faults.append(f"does not resume: {again.said}")
        elif place.hub.repositories["org/tiny"].files != expected:
            faults.append("another repository")
        stopped = f"at request {at} of {requests}"
        yield {"command": "publish", "stopped": stopped, "ended": ended.code, "starts": 2, "faults": faults}


@click.command(cls=Command)
@click.option("--kills", default=16, show_default=True, help="Of each command.")
@click.option("--seed", default=0, show_default=True, help="Of the moments.")
@click.option("--only", default="", help="Only commands whose name holds this text.")
@click.option(
    "--name", help="Keep the result in benchmarks/results/NAME.json, where other commands keep their rows."
)
def main(kills: int, seed: int, only: str, name: str | None) -> None:
    """Stop every command at many moments; see whether each ends in the same bits."""
    import torch

    torch.set_num_threads(1)
    begun, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="kills-") as directory, serving(Hub()) as hub:
        os.environ |= {
            "HF_ENDPOINT": hub.endpoint, "HF_HOME": f"{directory}/hf", "HF_TOKEN": "hf_owner",
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip
        place = Place(Path(directory), hub)
        draw = random.Random(seed)
        for command in [command for command in place.commands if only in command]:
            for row in stops(place, command, kills, draw):
                _tell(rows, row)
            if "two processes" not in command:
                if command != "report":
                    _tell(rows, two_at_once(place, command))
                found = small_disk(place, command, draw)
                if found is not None:
                    _tell(rows, found)
        for row in publications(place, kills) if only in "publish" else ():
            _tell(rows, row)
    wrong = [row for row in rows if row["faults"]]
    counts = Counter(row["command"] for row in rows)
    if name:
        call = f"python -m benchmarks.kills --kills {kills} --seed {seed}" + (
            f' --only "{only}"' if only else ""
        )
        _keep(name, call, rows, round(time.monotonic() - begun))
    missed = Counter(row["command"] for row in wrong)
    lines = [(command, str(count), str(missed[command])) for command, count in counts.items()]
    show_table("Stopped and given again", ("command", "stopped", "not right"), lines)
    if wrong:
        raise Unmet(f"{len(wrong)} of {len(rows)} runs that were stopped did not end as the one that was not")


def _keep(name: str, call: str, rows: list[dict[str, Any]], seconds: int) -> None:
    """Write a result, in which the rows of commands that did not run stay as an earlier run wrote them."""
    from kvfold.eval.subject import versions

    file = RESULTS / f"{name}.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"runs": [], "rows": []}
    now = {"command": call, "date": date.today().isoformat(), "versions": versions(), "seconds": seconds}
    ran = {row["command"] for row in rows}
    kept = [row for row in earlier["rows"] if row["command"] not in ran]
    kept += [{**row, "run": len(earlier["runs"])} for row in rows]
    result = {
        "runs": [*earlier["runs"], now],
        "kills": len(kept),
        "not_right": sum(bool(row["faults"]) for row in kept),
        "by_command": dict(Counter(row["command"] for row in kept)),
        "rows": kept,
    }
    save(name, result)


def _tell(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    rows.append(row)
    state = "; ".join(row["faults"]) or "identical"
    click.echo(f"{len(rows)} {row['command']}: {row['stopped']}, ended by {row['ended']}: {state}", err=True)


if __name__ == "__main__":
    main()
