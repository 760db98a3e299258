"""How a migration ends: the report, its page, and the chosen checkpoint under its final name."""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import __version__
from .convert.checkpoint import finish
from .convert.console import notice
from .migration import SCHEMA, Migration, replace_text, write_json

UNMET = ".unmet"  # at the end of the output's name, where it does not hold the bound


def arrive(asked: Migration, identity: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the smallest step that holds its name; where none does, the largest step another one."""
    held = [step for step in found if step["met"]]
    chosen = held[-1] if held else found[0]
    out = asked.out if held else asked.out.with_name(asked.out.name + UNMET)
    place = asked.partial / "distilled" / chosen["step"]
    moved = {str(place.resolve()): str(out.resolve()), str(asked.partial.resolve()): str(out.resolve() / "steps")}
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "kvfold": __version__,
        "met": bool(held),
        "out": str(out),
        "chosen": chosen["step"],
        "until": asked.bound.text,
        "source": str(asked.source),
        "to": asked.to,
        "identity": identity,
        "calibration": asked.calibration,
        "distillation": asked.asked()["recipe"],
        "steps": found,
        "not_tried": [step.name for step in asked.steps[len(found) :]],
    }
    report = json.loads(_moved(json.dumps(report), moved))
    write_json(place / "report.json", report)
    _write_page(asked, [asked.partial / "distilled" / step["step"] for step in found], place / "report.html")
    if asked.keep_steps:
        _keep_steps(asked, place)
    _relocate(place, moved)
    finish(place, out)
    return report


def _write_page(asked: Migration, directories: list[Path], page: Path) -> None:
    """The steps beside each other, as `kvfold report` shows them; left out, with a notice, where its libraries are not here."""
    if find_spec("matplotlib") is None or find_spec("jinja2") is None:
        notice("report.html was left out: pip install 'kvfold[report]'")
        return
    from .eval.page.document import compose, write
    from .eval.page.groups import read_groups

    page.unlink(missing_ok=True)
    write(compose(read_groups(directories)), page, None)


def _keep_steps(asked: Migration, place: Path) -> None:
    """Put all other checkpoints into the output, as links: a run that is stopped here finds them where they were."""
    kept = place / "steps"
    shutil.rmtree(kept, ignore_errors=True)
    for kind in ("folded", "distilled"):
        for path in sorted((asked.partial / kind).iterdir()):
            if path != place and not path.name.endswith(".partial"):
                shutil.copytree(path, kept / kind / path.name, copy_function=os.link)


def _relocate(place: Path, moved: dict[str, str]) -> None:
    """Have the records say where things lie when they have their final names."""
    for file in sorted(path for name in ("kvfold.json", "eval.json", "README.md") for path in place.rglob(name)):
        replace_text(file, _moved(file.read_text(encoding="utf-8"), moved))


def _moved(content: str, places: dict[str, str]) -> str:
    for old, new in places.items():
        content = content.replace(old, new).replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1])  # in text, and as JSON
    return content
