"""One case: a scene with a damaged file, one command on it in this process, and what must hold afterwards."""

import json
import math
import os
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from click.testing import CliRunner, Result

from kvfold.cli import main
from kvfold.core.errors import InvalidInput
from kvfold.models.causal_lm import load
from kvfold.models.load_options import LoadOptions

from . import hostile_sources
from .hostile_api import api
from .hostile_cases import COMMANDS, RESUMED, UNFINISHED, Case, damage
from .hostile_mutations import CANARY_CODE, SCRIPT
from .hostile_scene import SECRET

REFUSED = (2, 3)  # exit codes of a refusal, and of a check that fails
_OUTPUTS = (
    "out",
    "trained",
    "aligned",
    "moved",
    "e.json",
    "page.html",
    "kept.safetensors",
    "plan.png",
    "out.tower",
)
# What a run leaves that a full disk ended, for the next one to resume from.
_KEPT = {
    "e.json.partial": "e.json.partial", "trained.partial": "trained.partial/state",
    "moved.partial": "moved.partial",
    "aligned.partial": "aligned.partial/stages", "cache": "cache/manifest.json",
}  # fmt: skip
_LOSSLESS = ("api fold", "convert gqa", "convert mla", "convert sharded", "convert config", "resume convert")
_TOLERANCE = 1e-3  # of the largest logit; folds that lose nothing are within 1e-5 of it in float32


@dataclass
class Outcome:
    """A case that was run.

    Attributes:
        key: the case's.
        code: exit code; None where an exception came through.
        sentence: the last line of stderr.
        faults: what should not be; empty where all is right.
        seconds: of CPU time.
    """

    key: str
    code: int | None
    sentence: str
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


def lay_out(originals: Path, scene: Path, case: Case) -> None:
    """Put the sound files into a scene: what no command may write as links, the rest as copies."""
    shutil.rmtree(scene, ignore_errors=True)
    scene.mkdir()
    place = case.file.split("/")[0]
    for entry in originals.iterdir():
        if entry.name in UNFINISHED and case.command not in RESUMED:
            continue
        named = place, *(word.removeprefix("@") for word in COMMANDS.get(case.command, ()))
        if entry.name in (*hostile_sources.NAMES, hostile_sources.TOWER) and entry.name not in named:
            continue
        written = entry.name in UNFINISHED or entry.name == "cache"
        copy = shutil.copy2 if written else os.link
        if entry.is_dir():
            shutil.copytree(entry, scene / entry.name, copy_function=copy)
        else:
            copy(entry, scene / entry.name)
    if place in ("source", "fold", "remote") and not case.command.startswith(("verify", "publish")):
        (scene / place / "evil.py").write_text(CANARY_CODE)  # verify and publish refuse any code


def run_case(case: Case, originals: Path, scene: Path) -> Outcome:
    """Damage a file, run the command, and judge what it did.

    Args:
        case: the case.
        originals: the sound files, from `hostile_scene.build` with the path `scene`.
        scene: replaced.
    """
    begun = time.process_time()
    os.chdir("/")  # the scene is replaced
    lay_out(originals, scene, case)
    words = damage(case, scene)
    before = contents(scene)
    os.chdir(scene)
    is_api = words[0] == "api"
    command, given = (api, words[1:]) if is_api else (main, words)
    # In a fresh context, since a command that runs all cases is itself one that shows notices.
    with _disk_of(case):
        result = Context().run(CliRunner().invoke, command, list(given))
    faults = [*_faults_of_end(case, result), *_faults_of_files(case, result, before, contents(scene))]
    if result.exit_code == 0 and not faults:
        faults += [f"not right: {fault}" for fault in _wrong(case, result, scene)]
    lines = result.stderr.splitlines()
    seconds = time.process_time() - begun
    code = result.exit_code if isinstance(result.exception, SystemExit | None) else None
    return Outcome(case.key, code, lines[-1][:300] if lines else "", faults, round(seconds, 3))


@contextmanager
def _disk_of(case: Case) -> Iterator[None]:
    """Let no file of this process grow beyond the room of a case that has a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if case.kind == "disk":
        tempfile.gettempdir()  # which is found by writing into it, once for a process
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.number, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def contents(root: Path) -> dict[str, tuple[int, ...]]:
    """Return what shows a change of any entry of a directory; nothing is opened or followed."""
    found = {}
    for place, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = os.path.join(place, name)
            about = os.lstat(path)
            same = (about.st_mode, about.st_ino)
            is_directory = name in directories
            found[os.path.relpath(path, root)] = (
                same if is_directory else (*same, about.st_size, about.st_mtime_ns)
            )
    return found


def _names_a_place(sentence: str) -> bool:
    places = (str(Path.cwd()), tempfile.gettempdir())
    return any(place in sentence for place in places) and ("make room" in sentence or "TMPDIR" in sentence)


def _faults_of_end(case: Case, result: Result) -> Iterator[str]:
    if not isinstance(result.exception, SystemExit | None):
        told = "".join(traceback.format_exception(result.exception)[-2:]).strip()
        yield f"traceback: {told}"[-1500:]
        return
    if "Traceback" in result.stderr:
        yield "a traceback on stderr"
    if SECRET in result.output:
        yield "the secret was shown"
    control = {letter for letter in result.output if not letter.isprintable()} - {"\n"}
    if control:
        yield f"control characters are printed: {sorted(control)}"
    if result.exit_code == 0:
        return
    if result.exit_code not in REFUSED:
        yield f"exit code {result.exit_code}"
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("Error: ")]
    if result.exit_code == 3 and not lines and "does not pass" in result.stdout:
        return  # of verify, which shows a table
    if not errors or errors != lines[-1:]:
        yield f"not one sentence: {result.stderr[-500:]}"
    elif case.kind == "disk" and not _names_a_place(errors[0]):
        yield f"the sentence names no file, or does not say what to do: {errors[0]}"
    elif len(errors[0]) > 2000:
        yield f"a sentence of {len(errors[0])} characters"
    elif any(not character.isprintable() for character in errors[0]):
        yield f"unprintable characters in the sentence: {errors[0]!r}"


def _faults_of_files(
    case: Case, result: Result, before: dict[str, Any], after: dict[str, Any]
) -> Iterator[str]:
    if "canary" in after:
        yield "CODE WAS RUN"
    allowed = ("cache",) if case.command == "eval cache" else ()
    if case.command in RESUMED:
        allowed += UNFINISHED
    if result.exit_code == 0:
        allowed += _OUTPUTS
    if result.exit_code == 0 and case.file == "recipe.yaml":
        allowed += (_asked_output(Path.cwd()),)
    if "trained.partial/state" in after:  # a run that ends after its first step keeps its state
        allowed += ("trained.partial",)
    if case.kind == "disk":
        allowed += tuple(name for name, kept in _KEPT.items() if kept in after)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name) and name.split("/")[0] not in allowed:
            change = "left" if name not in before else "removed" if name not in after else "changed"
            yield f"{change} {name!r}"


def _asked_output(scene: Path) -> str:
    """Return the name of the output that a damaged recipe asks for."""
    output = yaml.safe_load((scene / "recipe.yaml").read_text(encoding="utf-8"))["output"]
    return os.path.relpath(output, scene).split("/")[0]


def _wrong(case: Case, result: Result, scene: Path) -> Iterator[str]:
    """Yield what is wrong with the result of a command that ended well."""
    if (scene / "page.html").exists() and SCRIPT in (scene / "page.html").read_text(encoding="utf-8"):
        yield "the page holds a script of a file"
    if "--json" in case.words:
        try:
            report = json.loads(result.stdout)
        except ValueError:
            yield "no JSON on stdout"
            return
        if case.command.startswith("eval"):
            yield from (
                f"{path} is {number}" for path, number in _numbers(report) if not math.isfinite(number)
            )
    if case.command.startswith("api") and result.output:
        yield f"the API prints {result.output[:300]!r}"
    if case.command.startswith(("convert", "resume convert", "api fold")):
        yield from _wrong_fold(case, scene)
    if (scene / "trained").exists():
        yield from _not_loaded(scene / "trained")[1]


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _numbers(inner, f"{path}.{key}")


def _wrong_fold(case: Case, scene: Path) -> Iterator[str]:
    out = scene / "out"
    model, problems = _not_loaded(out)
    yield from problems
    source = Path(json.loads((out / "kvfold.json").read_text(encoding="utf-8"))["source"]["path"])
    theirs, problems = _not_loaded(source)
    yield from (f"its source: {problem}" for problem in problems)
    if model is None or theirs is None:
        return
    sizes = (each.config.get_text_config().vocab_size for each in (model, theirs))
    ids = torch.arange(3, 15)[None] % min(sizes)
    try:
        with torch.inference_mode():
            one, other = (each(ids, use_cache=False).logits for each in (model, theirs))
    except Exception as error:  # whatever stops one of them
        yield f"it or its source does not run: {error}"
        return
    if not one.isfinite().all() and other.isfinite().all():
        yield "its logits are not finite"
    source_name = case.file.split("/")[0]
    is_lossless = case.command in _LOSSLESS or source_name in hostile_sources.NAMES
    # Attention of a quantised source is folded in its place in bfloat16, which rounds.
    is_lossless = is_lossless and source_name not in hostile_sources.QUANTISED_TOWERS
    if is_lossless and not case.file.endswith(".safetensors") and one.shape == other.shape:
        error = float((one - other).abs().max() / other.abs().max())
        if not error < _TOLERANCE:
            yield f"its logits differ from its source's by {error:.2g}"


def _not_loaded(directory: Path) -> tuple[Any, list[str]]:
    """Load a checkpoint as a user would; return the model, or why it cannot be loaded."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    # transformers reads most quantised weights with other packages or on a GPU only.
    if "auto_map" in config or hostile_sources.is_quantised(directory):
        try:
            options = LoadOptions(device="cpu", dtype="float32")
            return load(directory, options, multimodal="vision_config" in config).model, []
        except InvalidInput as error:
            return None, [f"kvfold refuses {directory.name}: {error}"[:500]]
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    try:
        model, told = kind.from_pretrained(
            directory,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            dtype=torch.float32,
        )
    except Exception as error:  # whatever transformers raises is the finding
        return None, [f"transformers refuses {directory.name}: {type(error).__name__}: {error}"[:500]]
    absent = [*told["missing_keys"], *told["mismatched_keys"]]
    return model, [f"transformers misses {absent[0]}"] if absent else []
