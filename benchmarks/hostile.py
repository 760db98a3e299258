"""Damaged and hostile files: `python -m benchmarks.hostile [--cases N] [--seed S] [--only TEXT]`.

Every kind of file that kvfold reads is damaged at random places, or replaced by a link, a pipe and the like,
and a command that reads it runs. A case is right if the command ends with exit code 0, or with 2 (3 of
verify) and one sentence; if nothing outside of its output appears, changes or disappears; and if no code of
the checkpoint runs and no file that a link names is shown. Exit code 3 where a case is not right.
"""

import json
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from kvfold.cli import main as kvfold
from kvfold.core.console import Command, progress, show_table

from .machine import save
from .scene import CALIBRATED, EVALUATED, GQA, LOSSLESS, MLA, SECRET, TOWER, build, build_others

PATIENCE = 120  # seconds of a case
MEMORY = 12 * 2**30  # bytes that a case may allocate
CANARY = "open('canary', 'w').close()"  # code that would write a file into the working directory
OUTPUTS = ("out", "trained", "e.json", "page.html")  # of commands; a word with @ is a place in the scene
_OUT = ("--out", "@out")
_TEXT = ("--text", "@text.txt", *EVALUATED, "--json")
_LINT = ("org/x", "--dry-run", "--verify", "lint")
COMMANDS: dict[str, tuple[str, ...]] = {
    "convert": ("convert", "@source", *GQA, *LOSSLESS, *_OUT),
    "convert mla": ("convert", "@source", *MLA, *LOSSLESS, *_OUT),
    "convert sharded": ("convert", "@sharded", *GQA, *LOSSLESS, *_OUT),
    "convert quantised": ("convert", "@quantised", *GQA, *LOSSLESS, *_OUT),
    "convert multimodal": ("convert", "@llava", *GQA, *LOSSLESS, *_OUT),
    "convert jsonl": ("convert", "@source", *GQA, "--calibration", "@text.jsonl", *CALIBRATED, *_OUT),
    "convert parquet": ("convert", "@source", *GQA, "--calibration", "@text.parquet", *CALIBRATED, *_OUT),
    "convert gz": ("convert", "@source", *GQA, "--calibration", "@text.jsonl.gz", *CALIBRATED, *_OUT),
    "convert statistics": (
        "convert", "@source", *GQA, "--calibration", "@taken.safetensors", "--refine", "0", *_OUT,
    ),
    "convert config": ("convert", "--config", "@request.yaml", *_OUT),
    "plan": ("plan", "@source", "--calibration", "none", "--json"),
    "assemble": ("assemble", f"@{TOWER}", "@llava", "--json", *_OUT),
    "eval source": ("eval", "@source", "--text", "@text.txt", "--suite", "ppl", *EVALUATED[2:], "--json"),
    "eval fold": ("eval", "@fold", *_TEXT),
    "eval remote": ("eval", "@remote", *_TEXT),
    "eval rows": ("eval", "@fold", "--text", "wikitext2-gptq-16", "--rows", "@rows.json", *EVALUATED),
    "eval jsonl": ("eval", "@fold", "--text", "@text.jsonl", *EVALUATED, "--json"),
    "eval cache": ("eval", "@distilled", *_TEXT, "--teacher-cache", "@cache"),
    "eval resumed": ("eval", "@fold", "--text", "@text.txt", *EVALUATED, "--out", "@e.json"),
    "distill": ("distill", "@recipe.yaml"),
    "verify": ("verify", "@fold", "--lint"),
    "verify remote": ("verify", "@remote", "--lint"),
    "quantize": ("quantize", "@fold", "--scheme", "w4a16", "--json", *_OUT),
    "publish": ("publish", "@fold", *_LINT),
    "publish remote": ("publish", "@remote", *_LINT),
    "report": ("report", "@fold", "@distilled", "--out", "@page.html"),
}  # fmt: skip
# What an earlier run left: only the commands that resume from it find it.
UNFINISHED = {
    "out.partial": ("convert",), "trained.partial": ("distill",), "e.json.partial": ("eval resumed",),
}  # fmt: skip
# Commands that go on from kept work, which is of checkpoints without more code than they had.
_RESUMED = ("eval cache", "eval resumed")
# Files, and the commands that read them.
FILES: dict[str, tuple[str, ...]] = {
    "source/config.json": ("convert", "convert mla", "plan", "eval source"),
    "source/model.safetensors": ("convert", "convert mla", "eval source"),
    "source/tokenizer.json": ("convert jsonl", "eval source", "distill"),
    "source/tokenizer_config.json": ("convert", "eval source"),
    "source/generation_config.json": ("convert", "eval source"),
    "source/README.md": ("convert",),
    "sharded/model.safetensors.index.json": ("convert sharded",),
    "quantised/config.json": ("convert quantised",),
    "quantised/model.safetensors": ("convert quantised",),
    "llava/config.json": ("convert multimodal", "assemble"),
    f"{TOWER}/kvfold.json": ("assemble",),
    "fold/config.json": ("eval fold", "verify", "publish", "quantize", "distill"),
    "fold/model.safetensors": ("eval fold", "verify", "quantize", "distill"),
    "fold/kvfold.json": ("eval fold", "verify", "publish", "report", "distill"),
    "fold/eval.json": ("report", "publish"),
    "fold/README.md": ("publish",),
    "remote/config.json": ("eval remote", "verify remote", "publish remote"),
    "remote/modeling_kvfold.py": ("eval remote", "verify remote", "publish remote"),
    "distilled/kvfold.json": ("report",),
    "distilled/metrics.jsonl": ("report",),
    "distilled/curve.json": ("report",),
    "taken.safetensors": ("convert statistics",),
    "cache/manifest.json": ("eval cache",),
    "cache/hidden": ("eval cache",),
    "text.jsonl": ("convert jsonl", "eval jsonl", "distill"),
    "text.parquet": ("convert parquet",),
    "text.jsonl.gz": ("convert gz",),
    "text.txt": ("eval fold",),
    "rows.json": ("eval rows",),
    "recipe.yaml": ("distill",),
    "request.yaml": ("convert config",),
    "out.partial/journal.jsonl": ("convert",),
    "e.json.partial/journal.jsonl": ("eval resumed",),
    "trained.partial/tokens.json": ("distill",),
    "trained.partial/metrics.jsonl": ("distill",),
    "trained.partial/state/step/progress.json": ("distill",),
    "trained.partial/state/step/weights.safetensors": ("distill",),
}
# Values of a field, of types and sizes that a reader may not expect.
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 7, 2**31, 2**63, 10**30, 0.5, 1e308, float("inf"), float("nan"), "", "x", "8",
    "../secret.key", "/etc/passwd", "\x00", "\ud800", "[bold]x[/bold]", "<script>", "x" * 10_000, [], [None],
    ["x"], [[1]], {}, {"a": 1}, [0] * 1000, "org/evil", "evil.py", "llama3",
)  # fmt: skip
KEYS = (
    "auto_map", "custom_pipelines", "attn_implementation", "quantization_config", "architectures",
    "model_type", "text_config", "rope_parameters", "tie_word_embeddings", "dtype", "layer_types", "schema",
    "chat_template", "tokenizer_class", "extra", "__metadata__", "",
)  # fmt: skip
WHOLE: tuple[bytes, ...] = (
    b"", b"null", b"[]", b"{}", b"7", b'"x"', b"[1]", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe",
    b"\x00" * 100, b"1e999", b"a: &a [*a]", b"a: !!python/object/apply:os.system ['touch canary']",
    b"---\n- [\n---\n", b"\x80\x04K\x01.", b"1" * 10**5, b'{"\\ud800": "\\ud800"}', b"\r\n\r\n",
)  # fmt: skip
# What a file becomes. The secret must not be read through any of them.
KINDS: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: None,
    "directory": lambda path: path.mkdir(),
    "outside": lambda path: path.symlink_to(Path.cwd() / "secret.key"),
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "circle": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
}


@dataclass(frozen=True)
class Case:
    """A damaged file and the command that reads it.

    Attributes:
        file: its name in `FILES`; empty for no damage.
        command: its name in `COMMANDS`.
        damage: a name in `KINDS`, or the seed of a change of content.
    """

    file: str
    command: str
    damage: str = ""

    @property
    def key(self) -> str:
        """The case in one word."""
        return f"{self.file}|{self.command}|{self.damage}"


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield every file as every kind, then `count` changes of content, evenly divided over the files."""
    pairs = [(file, command) for file, commands in FILES.items() for command in commands]
    yield from (Case(file, commands[0], kind) for file, commands in FILES.items() for kind in KINDS)
    yield from (Case(*pairs[number % len(pairs)], f"{seed}.{number}") for number in range(count))


def changed(name: str, content: bytes, draw: random.Random) -> bytes:
    """Return the content of a file with a damage that fits its kind."""
    if draw.random() < 0.15:
        return draw.choice(WHOLE)
    if draw.random() < 0.25 or name.endswith((".txt", ".gz", ".parquet")):
        return _change_bytes(content, draw)
    if name.endswith(".safetensors") or b"__metadata__" in content[:200]:
        length = struct.unpack("<Q", content[:8])[0]
        if draw.random() < 0.3:  # numbers that are none, in the tensors
            place = draw.randrange(8 + length, len(content) - 3)
            return content[:place] + b"\x00\x00\xc0\x7f" + content[place + 4 :]
        header = json.dumps(_change_value(json.loads(content[8 : 8 + length]), draw)).encode()
        return struct.pack("<Q", len(header)) + header + content[8 + length :]
    if name.endswith(".py"):
        return content + b"\n" + CANARY.encode() + b"\n"
    if name.endswith("README.md"):
        head = _change_value({"license": "mit", "tags": ["a"], "base_model": "org/x"}, draw)
        return b"---\n" + json.dumps(head).encode() + b"\n---\n" + content
    if name.endswith(".jsonl"):
        lines = content.splitlines()
        place = draw.randrange(len(lines))
        lines[place] = json.dumps(_change_value(json.loads(lines[place]), draw)).encode()
        return b"\n".join(lines) + b"\n"
    if name.endswith(".json"):
        return json.dumps(_change_value(json.loads(content), draw)).encode()
    return _change_bytes(content, draw)


def _change_bytes(content: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.randint(1, 3)):
        start, length = draw.randrange(len(content) + 1), draw.choice((0, 1, 2, 40, len(content)))
        new = draw.choice(
            (b"", b"[", b'"', b"null", b"-1", b"1e999", b"\xff", b"\x00", b"\n", draw.randbytes(4))
        )
        content = content[:start] + new + content[start + length :]
    return content


def _change_value(value: Any, draw: random.Random) -> Any:
    """Replace, remove, rename or add parts of a JSON value, at any depth."""
    for _ in range(draw.choice((1, 1, 2))):
        places, pending = [], [value]
        while pending:
            holder = pending.pop()
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            places += [(holder, key) for key in keys]
            pending += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
        if not places or (isinstance(value, dict) and draw.random() < 0.15):
            return {**value, draw.choice(KEYS): draw.choice(VALUES)} if isinstance(value, dict) else None
        holder, key = draw.choice(places)
        action = draw.random()
        if action < 0.7:
            holder[key] = draw.choice(VALUES)
        elif action < 0.85 and isinstance(holder, dict):
            holder[draw.choice(KEYS)] = holder.pop(key)
        else:
            del holder[key]
    return value


def run_case(case: Case, originals: Path, scene: Path) -> tuple[int | None, list[str]]:
    """Lay out a scene, damage a file, run the command, and return its exit code and what is not right.

    Args:
        case: the case.
        originals: the sound files, of `scene.build` with the path `scene`.
        scene: replaced.
    """
    os.chdir("/")
    shutil.rmtree(scene, ignore_errors=True)
    shutil.copytree(originals, scene, symlinks=True)
    os.chdir(scene)
    for name, commands in UNFINISHED.items():
        place = scene / name
        if case.command not in commands or (name == "out.partial" and not case.file.startswith(name)):
            shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    # verify and publish refuse any code
    if case.command.partition(" ")[0] not in ("verify", "publish") and case.command not in _RESUMED:
        for directory in ("source", "fold", "remote"):
            (scene / directory / "evil.py").write_text(CANARY)
    if case.file:
        path = place_of(case.file, scene)
        content = path.read_bytes()
        path.unlink()
        if case.damage in KINDS:
            KINDS[case.damage](path)
        else:
            path.write_bytes(changed(case.file, content, random.Random(case.key)))
    words = [f"{scene}/{word[1:]}" if word.startswith("@") else word for word in COMMANDS[case.command]]
    before = _contents(scene)
    # In a fresh context, since the command that runs all cases shows notices.
    result = Context().run(CliRunner().invoke, kvfold, words)
    faults = [*_faults_of_end(result), *_faults_of_files(case, result.exit_code, before, _contents(scene))]
    return result.exit_code, faults


def place_of(file: str, scene: Path) -> Path:
    """Return the path of a file, of which some parts have numbers in their names."""
    path = scene
    for part in file.split("/"):
        exact = path / part
        path = exact if exact.exists() else sorted(path.glob(f"{part}-*"))[-1]
    return path


def _contents(root: Path) -> dict[str, tuple[int, ...]]:
    """Return what shows a change of any entry of a directory; nothing is opened or followed."""
    found = {}
    for place, directories, files in os.walk(root):
        for name in (*directories, *files):
            about = os.lstat(os.path.join(place, name))
            times = () if name in directories else (about.st_size, about.st_mtime_ns)
            found[os.path.relpath(os.path.join(place, name), root)] = (about.st_mode, about.st_ino, *times)
    return found


def _faults_of_end(result: Result) -> Iterator[str]:
    if not isinstance(result.exception, SystemExit | None):
        yield "traceback: " + "".join(traceback.format_exception(result.exception)[-2:])[-1500:]
        return
    if SECRET in result.output:
        yield "the secret was shown"
    if result.exit_code == 0:
        return
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("Error: ")]
    if result.exit_code == 3 and not errors and "does not pass" in result.stdout:
        return  # of verify, which shows a table
    if result.exit_code not in (2, 3):
        yield f"exit code {result.exit_code}"
    if len(errors) != 1 or errors != lines[-1:] or "Traceback" in result.stderr:
        yield f"not one sentence: {result.stderr[-500:]}"
    elif len(errors[0]) > 2000 or not errors[0].isprintable():
        yield f"a sentence that is too long or does not print: {errors[0]!r}"


def _faults_of_files(case: Case, code: int, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    if "canary" in after:
        yield "CODE WAS RUN"
    allowed = {name for name, commands in UNFINISHED.items() if case.command in commands}
    allowed |= {"cache"} if case.command == "eval cache" else set()
    allowed |= set(OUTPUTS) if code == 0 else set()
    if case.file == "recipe.yaml":  # a damaged recipe may ask for another output
        allowed |= after.keys() - before.keys()
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name) and name.split("/")[0] not in allowed:
            change = "left" if name not in before else "removed" if name not in after else "changed"
            yield f"{change} {name!r}"


def run_apart(case: Case, originals: Path, scene: Path) -> tuple[int | None, list[str]]:
    """Run a case in a forked process, which ends by crashes, endless loops and full memories alone."""
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
                signal.alarm(PATIENCE)
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 1)
                os.dup2(quiet, 2)
                told.write(json.dumps(run_case(case, originals, scene)).encode())
                told.flush()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        content = told.read()
    if not content:
        return None, [f"its process ended by {os.waitstatus_to_exitcode(status)}, without a result"]
    code, faults = json.loads(content)
    return code, faults


@click.command(cls=Command)
@click.option("--cases", "count", default=2000, show_default=True, help="Changes of content.")
@click.option("--seed", default=0, show_default=True, help="Of the changes.")
@click.option("--only", default="", help="Only cases whose key holds this text.")
@click.option("--name", help="Keep the summary in benchmarks/results/NAME.json.")
def main(count: int, seed: int, only: str, name: str | None) -> None:
    """Run kvfold on damaged and hostile files."""
    import torch

    torch.set_num_threads(1)
    todo = [case for case in cases(count, seed) if only in case.key]
    rows = {file: {"cases": 0, "refused": 0, "accepted": 0, "not right": 0} for file in FILES}
    wrong: dict[str, list[str]] = {}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvfold-hostile-") as root:
        scene, originals = Path(root) / "scene", Path(root) / "originals"
        build(scene)
        build_others(scene)
        scene.rename(originals)
        for case in progress(todo, "cases", len(todo)):
            code, faults = run_apart(case, originals, scene)
            kind = "not right" if faults else "accepted" if code == 0 else "refused"
            rows[case.file]["cases"] += 1
            rows[case.file][kind] += 1
            if faults:
                wrong[case.key] = faults
                click.echo(f"{case.key}: {faults[0]}", err=True)
    columns = ("cases", "refused", "accepted", "not right")
    shown = [(file, *(str(row[key]) for key in columns)) for file, row in rows.items() if row["cases"]]
    show_table("Damaged and hostile files", ("file", *columns), shown)
    if name:
        result = {"command": f"python -m benchmarks.hostile --cases {count} --seed {seed}"}
        total = {key: sum(row[key] for row in rows.values()) for key in columns}
        save(
            name,
            {**result, **total, "seconds": round(time.monotonic() - begun), "by_file": rows, "faults": wrong},
        )
    if wrong:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
