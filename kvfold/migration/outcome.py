"""The end of a migration: the report, its page, and the chosen checkpoint under its final name."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..checkpoints.card import FILE as CARD_FILE
from ..checkpoints.directory import check_output, finish
from ..checkpoints.record import FILE as RECORD_FILE
from ..checkpoints.record import read_record
from ..convert.write.model_card import write_card
from ..core.console import notice
from ..core.errors import InvalidInput
from ..core.files import check_makeable, link_or_copy, replace_text
from ..core.untrusted import read_json
from ..core.version import __version__
from ..core.work import WorkDir
from .request import SCHEMA, Migration

PAGE = "report.html"


def find_report(asked: Migration) -> dict[str, Any] | None:
    """Return the report of a finished run with the same bound; None if there is none.

    The run had given its output its name, and was killed before it had tidied up.
    """
    file = asked.out / "report.json"
    if not file.is_file() or WorkDir(asked.partial).result() is None:
        return None
    report: dict[str, Any] = read_json(file)
    return report if report.get("until") == asked.bound.text else None


def check_places(asked: Migration) -> None:
    """Refuse outputs that exist, and places where nothing can be made.

    Outputs that an earlier run of this migration left without meeting its bound are allowed.

    Raises:
        InvalidInput: names the output, and what to do.
    """
    check_output(asked.out, asked.source)
    check_makeable(asked.out)
    unmet = asked.unmet
    if unmet.is_dir() and not unmet.is_symlink() and WorkDir(asked.partial).request() is not None:
        return
    if unmet.exists() or unmet.is_symlink():
        raise InvalidInput(
            f"{unmet} exists without {asked.partial}, from which another bound could resume; move or remove "
            "it, or name another --out"
        )


def arrive(
    asked: Migration, identity: dict[str, Any], found: list[dict[str, Any]], work: WorkDir
) -> dict[str, Any]:
    """Give the smallest step within the bound its final name.

    If no step is within it, a copy of the nearest step gets another name.

    Returns:
        The report.

    Raises:
        InvalidInput: the name is taken by another step, of an earlier run in which none was within the bound.
    """
    held = [step for step in found if step["met"]]
    chosen = held[-1] if held else found[0]
    out = asked.out if held else asked.unmet
    origin = asked.partial / chosen["kept"] / chosen["step"]
    moved = {
        str(origin.resolve()): str(out.resolve()),
        str(asked.partial.resolve()): str(out.resolve() / "steps"),
    }
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "kvfold": __version__,
        "met": bool(held),
        "out": str(out.resolve()),
        "chosen": chosen["step"],
        "kept": chosen["kept"],
        "until": asked.bound.text,
        "source": str(asked.source),
        "to": asked.wanted.to,
        "identity": identity,
        "calibration": asked.calibration,
        "distillation": asked.asked()["recipe"],
        "steps": found,
        "not_tried": [step.name for step in asked.steps[len(found) :]],
    }
    report = json.loads(_moved(json.dumps(report), moved))
    place = origin
    if not held:  # a copy that takes no room, so that the original can be resumed from
        place = asked.partial / "unmet"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(origin, place, copy_function=link_or_copy)
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    replace_text(place / "report.json", text + "\n")
    lasting = {}  # where a step's checkpoint is once the search has ended; the output if it is nowhere
    for name in (Path(step["kept"], step["step"]) for step in found):
        stays = asked.wanted.keep_steps and asked.partial / name != origin
        lasting[asked.partial / name] = out.resolve() / "steps" / name if stays else out.resolve()
    _write_page(lasting, place / PAGE)
    if asked.wanted.keep_steps:
        # As links: a run that is stopped here finds them where they were.
        shutil.rmtree(place / "steps", ignore_errors=True)
        for found_at in sorted(asked.partial.glob("folded/*")) + sorted(asked.partial.glob("distilled/*")):
            if found_at != origin and not found_at.name.endswith(".partial"):
                kept = place / "steps" / found_at.relative_to(asked.partial)
                shutil.copytree(found_at, kept, copy_function=link_or_copy)
    for kind in (RECORD_FILE, "eval.json", CARD_FILE):
        for file in sorted(place.rglob(kind)):
            replace_text(file, _moved(file.read_text(encoding="utf-8"), moved))
    record = read_record(place)
    assert record is not None, "every step has a record"
    record["migrate"] = {"command": asked.command}
    replace_text(place / RECORD_FILE, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    write_card(place, record)
    if held:
        work.finish(place, out)
    elif out.exists():
        _renew(out, place)
    else:
        finish(place, out)
    if held and asked.unmet.exists():
        notice(f"{asked.unmet} is of an earlier bound; remove it if you do not need it")
    return report


def _renew(out: Path, place: Path) -> None:
    """Replace the reports if the same step was not within the bound before."""
    weights = next(iter(sorted(place.glob("*.safetensors"))))
    if not (out / weights.name).exists() or not (out / weights.name).samefile(weights):
        raise InvalidInput(
            f"{out} holds a checkpoint that is no longer the nearest one; move it, and run the same command "
            f"again to resume from {place.parent}"
        )
    for name in ("report.json", PAGE, RECORD_FILE, CARD_FILE):
        if (place / name).exists():
            (place / name).replace(out / name)
    shutil.rmtree(place)


def _write_page(places: dict[Path, Path], page: Path) -> None:
    """Write a page that compares the steps, as `kvfold report` does.

    It is left out, with a notice, if its libraries are not installed.
    """
    if find_spec("matplotlib") is None or find_spec("jinja2") is None:
        notice("report.html was left out; to have it, run pip install 'kvfold[report]'")
        return
    from ..eval.page.document import compose, write
    from ..eval.page.groups import read_groups

    page.unlink(missing_ok=True)
    groups = [
        replace(group, members=tuple(replace(one, directory=places[one.directory]) for one in group.members))
        for group in read_groups(list(places))
    ]
    write(compose(groups), page, None)


def _moved(content: str, places: dict[str, str]) -> str:
    for old, new in places.items():
        content = content.replace(old, new)
        content = content.replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1])  # as JSON writes it
    return content
