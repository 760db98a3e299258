"""Predicted loss against cache, for a whole sweep of targets: rows for a table and JSON, and a picture."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import InvalidInput
from ..core.files import whole_file

if TYPE_CHECKING:
    from .ranking import Row

SHARES = ("75%", "62.5%", "50%", "37.5%", "25%", "18.75%", "12.5%", "9.375%", "6.25%")
_KNEE = 1e-3  # of the loss axis: below it is linear, so that nothing lost has a place


def points_of(rows: Iterable["Row"]) -> list[dict[str, Any]]:
    """Return the least loss of each kind at each size, smallest cache last.

    A point has a `line` and a `label`, the cache's `elements` and `share` of the source's, and the `loss`.
    The share is of bytes where the cache is in a number format. Rows without a prediction are left out.
    """
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        if row.loss is None:
            continue
        cache = row.candidate.plan.cache()
        elements = cache["after"]["elements_per_token_per_layer"]
        line, share = row.candidate.kind, cache["ratio"]
        if row.kind is not None:
            line, share = f"{line}, {row.kind.name}", row.share
        point = {"line": line, "label": row.name, "elements": elements, "share": share, "loss": row.loss}
        if (line, elements) not in best or row.loss < best[line, elements]["loss"]:
            best[line, elements] = point
    return sorted(best.values(), key=lambda point: (point["line"], -point["elements"]))


def check_picture(file: Path) -> None:
    """Refuse, before any work, a picture that could not be drawn.

    Raises:
        InvalidInput: the file exists or is no PNG, its directory does not exist, or matplotlib is not
            installed.
    """
    if file.suffix.lower() != ".png":
        raise InvalidInput(f"--png {file} does not end in .png; name a PNG file")
    if file.exists():
        raise InvalidInput(f"--png {file} exists, and nothing is overwritten; name another file")
    if not file.absolute().parent.is_dir():
        raise InvalidInput(f"--png {file}: there is no directory {file.parent}; make it first")
    if find_spec("matplotlib") is None:
        raise InvalidInput(
            "--png needs matplotlib, which is not installed; pip install 'kvfold[report]', or use --json"
        )


def draw(points: Sequence[Mapping[str, Any]], calibrated: bool, title: str, file: Path) -> None:
    """Write a PNG with a line for each kind of target; the file appears only when whole."""
    from matplotlib.figure import Figure  # without pyplot, which would look for a display

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    lines = dict.fromkeys(point["line"] for point in points)
    for marker, line in zip(cycle("osD^v"), lines, strict=False):
        own = [(point["share"], point["loss"]) for point in points if point["line"] == line]
        axes.plot(*zip(*own, strict=True), marker=marker, label=line)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=_KNEE)
    axes.set_ylim(bottom=0)
    least = min(point["share"] for point in points)
    shares = [0.5**power for power in range(8) if least <= 1.01 * 0.5**power]
    axes.set_xticks(shares, [f"{100 * share:.3g} %" for share in shares])
    axes.set_xlabel("cache, share of the source's")
    by_weights = "predicted error of attention's output (weights only)"
    axes.set_ylabel("predicted loss, nats per token" if calibrated else by_weights)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    with whole_file(file) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
