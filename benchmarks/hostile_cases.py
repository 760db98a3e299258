"""The cases: which file is damaged, in which way, and which command then reads it."""

import hashlib
import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import hostile_sources
from .hostile_mutations import (
    CARD_FILE,
    CODE_FILE,
    JSON_FILE,
    LINES_FILE,
    TABLE_FILE,
    TENSOR_FILE,
    TEXT_FILE,
    Mutation,
)
from .hostile_scene import CALIBRATED, EVALUATED, GQA, LOSSLESS, MIGRATION, MLA

# Commands by name. A word that begins with @ is a place in the scene.
_TEXT = ("--text", "@text.txt", *EVALUATED)
_ROWS = ("--text", "wikitext2-gptq-16", "--rows", "@rows.json")
_SOURCE = ("convert", "@source", *GQA)
_WRITTEN = ("--out", "@out")
_MIGRATED = (
    "migrate",
    "@source",
    *MIGRATION,
    "--text",
    "@text.txt",
    "--train",
    "@text.jsonl",
    "--out",
    "@moved",
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "convert gqa": ("convert", "@source", *GQA, *LOSSLESS, "--out", "@out"),
    "convert mla": ("convert", "@source", *MLA, *LOSSLESS, "--out", "@out"),
    "convert sharded": ("convert", "@sharded", *GQA, *LOSSLESS, "--out", "@out"),
    "convert calibrated": (*_SOURCE, "--calibration", "@text.jsonl", *CALIBRATED, *_WRITTEN),
    "convert statistics": (*_SOURCE, "--calibration", "@taken.safetensors", "--refine", "0", *_WRITTEN),
    "convert parquet": (*_SOURCE, "--calibration", "@text.parquet", *CALIBRATED, *_WRITTEN),
    "convert gz": (*_SOURCE, "--calibration", "@text.jsonl.gz", *CALIBRATED, *_WRITTEN),
    "convert config": ("convert", "--config", "@request.yaml", "--out", "@out"),
    "plan": ("plan", "@source", "--calibration", "none", "--json"),
    "plan statistics": ("plan", "@source", "--calibration", "@taken.safetensors", "--json"),
    "eval source": ("eval", "@source", "--text", "@text.txt", "--suite", "ppl", *EVALUATED[2:], "--json"),
    "eval sharded": ("eval", "@sharded", "--text", "@text.txt", "--suite", "ppl", *EVALUATED[2:], "--json"),
    "eval fold": ("eval", "@fold", *_TEXT, "--json"),
    "eval remote": ("eval", "@remote", *_TEXT, "--json"),
    "eval resumed": ("eval", "@fold", *_TEXT, "--out", "@e.json"),
    "eval cache": ("eval", "@distilled", *_TEXT, "--teacher-cache", "@cache", "--json"),
    "eval jsonl": ("eval", "@fold", "--text", "@text.jsonl", *EVALUATED, "--json"),
    "eval parquet": ("eval", "@fold", "--text", "@text.parquet", *EVALUATED, "--json"),
    "eval gz": ("eval", "@fold", "--text", "@text.jsonl.gz", *EVALUATED, "--json"),
    "eval rows": ("eval", "@fold", *_ROWS, *EVALUATED, "--json"),
    "distill": ("distill", "@recipe.yaml"),
    "distill validate": ("distill", "validate", "@recipe.yaml"),
    "verify fold": ("verify", "@fold", "--lint"),
    "verify remote": ("verify", "@remote", "--lint"),
    "quantize": ("quantize", "@fold", "--scheme", "w4a16", "--json", "--out", "@out"),
    "quantize remote": ("quantize", "@remote", "--scheme", "fp8", "--json", "--out", "@out"),
    "publish fold": ("publish", "@fold", "org/x", "--dry-run", "--verify", "lint", "--json"),
    "publish remote": ("publish", "@remote", "org/x", "--dry-run", "--verify", "lint", "--json"),
    "publish distilled": ("publish", "@distilled", "org/x", "--dry-run", "--verify", "lint", "--json"),
    "report": ("report", "@fold", "@distilled", "--out", "@page.html"),
    "verify run": ("verify", "@fold"),
    "convert kept": (
        *_SOURCE, "--calibration", "@text.jsonl", *CALIBRATED, "--save-statistics", "@kept.safetensors",
        *_WRITTEN,
    ),
    "eval kept": ("eval", "@fold", *_TEXT, "--out", "@e.json"),
    "plan drawn": ("plan", "@source", "--calibration", "none", "--png", "@plan.png"),
    "report plain": ("report", "@fold", "--out", "@page.html"),
    "eval latent": ("eval", "@latent", *_TEXT, "--json"),
    "migrate plan": (*_MIGRATED, "--dry-run", "--json"),
    "migrate": _MIGRATED,
    "distill stages": ("distill", "@stages.yaml"),
    "api fold": ("api", "fold", "@source", "@out"),
    "api plan": ("api", "plan", "@source"),
    "api evaluate": ("api", "evaluate", "@fold", "@text.txt"),
    "api verify": ("api", "verify", "@fold"),
    "api publish": ("api", "publish", "@fold"),
    "api report": ("api", "report", "@fold", "@distilled", "@page.html"),
    "api train": ("api", "train", "@recipe.yaml"),
    "api absorb": ("api", "absorb", "@latent"),
}  # fmt: skip
COMMANDS |= hostile_sources.commands()
# Unfinished work that a command is meant to find; of the others none is there.
RESUMED = {
    "resume convert": "convert gqa", "eval resumed": "eval resumed", "resume distill": "distill",
    "resume forged": "distill", "resume stages": "distill stages", "resume migrate": "migrate",
}  # fmt: skip
UNFINISHED = (
    "out.partial", "trained.partial", "e.json.partial", ".kvfold-e.json.lock", "aligned.partial",
    "moved.partial",
)  # fmt: skip
# Commands that take seconds, with the most changes of content that each of their files gets.
SLOW = {"verify run": 10, "resume migrate": 10, "resume stages": 16, "migrate plan": 16}
_CHECKPOINTS = ("convert gqa", "convert mla", "plan", "eval source", "eval fold", "distill")
_FOLDS = ("eval fold", "distill", "verify fold", "publish fold", "quantize")
_API = ("api fold", "api plan")
_API_OF_FOLDS = ("api evaluate", "api verify", "api publish")

# Files, how their content is changed, and the commands that read them.
FILES: dict[str, tuple[tuple[Mutation, ...], tuple[str, ...]]] = {
    "source/config.json": (JSON_FILE, (*_CHECKPOINTS, "convert statistics", *_API, "migrate plan")),
    "source/model.safetensors": (TENSOR_FILE, (*_CHECKPOINTS, *_API, "migrate plan")),
    "source/tokenizer.json": (
        JSON_FILE,
        ("eval source", "eval fold", "convert calibrated", "distill", "api train"),
    ),
    "source/tokenizer_config.json": (
        JSON_FILE,
        ("convert gqa", "eval source", "convert calibrated", "distill"),
    ),
    "source/generation_config.json": (JSON_FILE, ("convert gqa", "convert mla", "eval source", "distill")),
    "source/README.md": (CARD_FILE, ("convert gqa", "distill")),
    "sharded/model.safetensors.index.json": (JSON_FILE, ("convert sharded", "eval sharded")),
    "fold/config.json": (JSON_FILE, (*_FOLDS, *_API_OF_FOLDS, "verify run")),
    "fold/model.safetensors": (TENSOR_FILE, (*_FOLDS, "api evaluate", "verify run")),
    "fold/kvfold.json": (JSON_FILE, (*_FOLDS, "report", *_API_OF_FOLDS, "verify run")),
    "fold/README.md": (CARD_FILE, ("publish fold", "distill")),
    "fold/eval.json": (JSON_FILE, ("report", "publish fold", "api report")),
    "fold/tokenizer.json": (JSON_FILE, ("eval fold", "distill")),
    "fold/generation_config.json": (JSON_FILE, ("publish fold", "distill")),
    "remote/config.json": (JSON_FILE, ("eval remote", "verify remote", "publish remote", "quantize remote")),
    "remote/kvfold.json": (JSON_FILE, ("eval remote", "publish remote")),
    "remote/modeling_kvfold.py": (
        CODE_FILE,
        ("eval remote", "verify remote", "publish remote", "quantize remote"),
    ),
    "distilled/kvfold.json": (JSON_FILE, ("report", "publish distilled", "eval cache")),
    "distilled/metrics.jsonl": (LINES_FILE, ("report",)),
    "distilled/curve.json": (JSON_FILE, ("report",)),
    "taken.safetensors": (TENSOR_FILE, ("convert statistics", "plan statistics")),
    "cache/manifest.json": (JSON_FILE, ("eval cache",)),
    "cache/head.safetensors": (TENSOR_FILE, ("eval cache",)),
    "cache/hidden": (TENSOR_FILE, ("eval cache",)),
    "text.jsonl": (LINES_FILE, ("convert calibrated", "distill", "eval jsonl")),
    "text.parquet": (TABLE_FILE, ("convert parquet", "eval parquet")),
    "text.jsonl.gz": (TEXT_FILE, ("convert gz", "eval gz")),
    "text.txt": (TEXT_FILE, ("eval fold", "api evaluate")),
    "rows.json": (JSON_FILE, ("eval rows",)),
    "recipe.yaml": (CARD_FILE[1:], ("distill validate", "distill", "api train")),
    "request.yaml": (CARD_FILE[2:], ("convert config",)),
    "out.partial/journal.jsonl": (LINES_FILE, ("resume convert",)),
    "e.json.partial/journal.jsonl": (LINES_FILE, ("eval resumed",)),
    "trained.partial/tokens.json": (JSON_FILE, ("resume distill",)),
    "trained.partial/metrics.jsonl": (LINES_FILE, ("resume distill",)),
    "trained.partial/evaluations.jsonl": (LINES_FILE, ("resume distill",)),
    "trained.partial/state/step/progress.json": (JSON_FILE, ("resume distill", "resume forged")),
    "trained.partial/state/step/manifest.json": (JSON_FILE, ("resume distill",)),
    "trained.partial/state/step/weights.safetensors": (TENSOR_FILE, ("resume distill", "resume forged")),
    "trained.partial/state/step/optimizer.safetensors": (TENSOR_FILE, ("resume distill", "resume forged")),
    "trained.partial/tokens.bin": (TEXT_FILE, ("resume distill",)),
    "trained.partial/marks.bin": (TEXT_FILE, ("resume distill",)),
    "aligned.partial/stages/stream.stream/boundary/step": (TENSOR_FILE, ("resume stages",)),
    "aligned.partial/stages/stream.stream/layer-00000.safetensors": (TENSOR_FILE, ("resume stages",)),
    "aligned.partial/stages/stream.stream/layer-00000.json": (JSON_FILE, ("resume stages",)),
    "moved.partial/journal.jsonl": (LINES_FILE, ("resume migrate",)),
    "moved.partial/statistics.safetensors": (TENSOR_FILE, ("resume migrate",)),
    "moved.partial/distilled/50%/eval.json": (JSON_FILE, ("resume migrate",)),
    "moved.partial/distilled/50%/kvfold.json": (JSON_FILE, ("resume migrate",)),
    "moved.partial/folded/50%/config.json": (JSON_FILE, ("resume migrate",)),
    "latent/config.json": (JSON_FILE, ("eval latent", "api absorb")),
    "latent/model.safetensors": (TENSOR_FILE, ("eval latent", "api absorb")),
}
OTHER_FILES = hostile_sources.files()  # of sources that are no plain Llama
# Commands on a disk that is full: no file may grow beyond so many bytes.
FILLED = (
    "convert gqa", "convert kept", "convert calibrated", "distill", "distill stages", "eval kept",
    "eval cache",
    "report", "report plain", "plan drawn", "migrate", "publish fold", "publish remote", "api fold",
    "api plan",
    "api evaluate", "api report", "api train", "eval source", "verify fold", "verify run", "convert parquet",
    "assemble",
)  # fmt: skip
ROOM = (0, 1, 500, 4096, 65536)  # bytes
# A file becomes something else. The scene's secret must be read by none of them.
KINDS: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: None,
    "directory": lambda path: path.mkdir(),
    "outside": lambda path: path.symlink_to(
        os.path.relpath(path.parents[_depth(path)] / "secret.key", path.parent)
    ),
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/stdin"),
    "nothing": lambda path: path.symlink_to("nothing"),
    "circle": lambda path: path.symlink_to(path.name),
    "pipe": lambda path: os.mkfifo(path),
    "socket": lambda path: _socket(path),
    "holes": lambda path: _holes(path),
}
NAMES = (
    "[bold]x", "[", "a\x1b[31mb", "a\nb", ":smile:", "-x", "--help", "a b", "é漢", os.fsdecode(b"a\xff"),
    "$(touch canary)", "a::b", "*", "?", "~", "x" * 200, "a;b", "con", "a'b", 'a"b', "%s", "{0}", "..a",
    ".hidden", "a\tb", "@main",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One damaged file and one command.

    Attributes:
        file: the damaged file, by its name in `FILES`.
        command: the name of the command.
        number: which of the cases of this file and command; it seeds the damage.
        kind: what the file becomes, of `KINDS`; empty for other content; `name` for another directory's name;
            `sound` for no damage; `disk` for a disk on which no file may be larger than `number` bytes.
    """

    file: str
    command: str
    number: int
    kind: str = ""

    @property
    def key(self) -> str:
        """The case in one word."""
        return f"{self.file}|{self.command}|{self.kind}{self.number}"

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command."""
        return COMMANDS[RESUMED.get(self.command, self.command)]


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield every file as every kind with every command, then `count` changes of content, evenly divided."""
    pairs = [(file, command) for file, (_, commands) in FILES.items() for command in commands]
    for file, command in pairs:
        for kind in KINDS:
            if kind == "holes" and file.startswith("text.json") and command == "distill":
                continue  # 16 GB of one line, which a process of its own reads in minutes
            yield Case(file, command, 0, kind)
    for number in range(len(NAMES)):
        for command, place in (
            ("convert gqa", "source"),
            ("eval fold", "fold"),
            ("verify fold", "fold"),
            ("publish fold", "fold"),
        ):
            yield Case(place, command, number, "name")
    for command in FILLED:
        for number in ROOM:
            yield Case("disk", command, number, "disk")
    others = [(file, command) for file, (_, commands) in OTHER_FILES.items() for command in commands]
    for number in range(count // 3):
        file, command = others[number % len(others)]
        yield Case(file, command, seed * 10**6 + number // len(others))
    for number in range(count):
        file, command = pairs[number % len(pairs)]
        if number // len(pairs) >= SLOW.get(command, number):
            continue
        yield Case(file, command, seed * 10**6 + number // len(pairs))


def damage(case: Case, scene: Path) -> tuple[str, ...]:
    """Damage the file of a case in a scene.

    Returns:
        The words of its command, with places.
    """
    words = case.words
    if case.kind == "name":
        name = NAMES[case.number]
        (scene / case.file).rename(scene / name)
        words = tuple(f"@{name}" if word == f"@{case.file}" else word for word in words)
        return tuple(str(scene / word[1:]) if word.startswith("@") else word for word in words)
    if case.kind in ("sound", "disk"):
        return tuple(str(scene / word[1:]) if word.startswith("@") else word for word in words)
    path = place_of(case.file, scene)
    content = path.read_bytes()
    path.unlink()  # it may be a link to the sound file
    if case.kind:
        KINDS[case.kind](path)
    else:
        draw = random.Random(case.key)
        changes = {**FILES, **OTHER_FILES}[case.file][0]
        path.write_bytes(draw.choice(changes)(content, draw))
    if case.command == "resume forged":
        _forge(path)
    return tuple(str(scene / word[1:]) if word.startswith("@") else word for word in words)


def place_of(file: str, scene: Path) -> Path:
    """Return the path of a file, of which some parts have numbers in their names."""
    path = scene
    for part in file.split("/"):
        found = path / part
        if not found.exists():
            found = sorted(entry for entry in path.glob(f"{part}-*") if entry.suffix != ".partial")[-1]
        path = found
    return path


def _forge(path: Path) -> None:
    """Let the manifest of a training state say that a file of it is as it was written."""
    manifest = path.with_name("manifest.json")
    if not path.is_file() or path.stat().st_size > 2**24 or path.is_symlink():
        return
    hashes = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.unlink()  # it may be a link to the sound file
    hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(hashes), encoding="utf-8")


def _depth(path: Path) -> int:
    return next(number for number, parent in enumerate(path.parents) if (parent / "secret.key").exists())


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # an address of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def _holes(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(2**34)  # none of it is stored
