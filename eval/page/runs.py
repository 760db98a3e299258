"""Figures of needles, distillation and speed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...checkpoints.cost_blocks import Quartiles, SpeedBlock
from ...checkpoints.quality_blocks import Grid, NeedleMap
from .canvas import LIGHT, brief, figure, legend, plain_log, series, tip
from .groups import Group
from .records import Found

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMOOTH = 40  # points of a loss curve; more are averaged


def needles(found: NeedleMap, grid: Grid) -> "Figure":
    """Draw the share of needles found, `accuracy` or `choice`, by length of the text and depth in it."""
    from matplotlib.colors import LinearSegmentedColormap

    drawn, axes = figure(1.1 + 0.36 * len(found.depths))
    colours = LinearSegmentedColormap.from_list("found", ["#e58a80", "#f2d58a", "#7fc79a"])
    transposed = list(zip(*grid, strict=True))  # one row per depth
    axes.pcolormesh(transposed, cmap=colours, vmin=0, vmax=1, edgecolors=LIGHT["surface"], linewidth=1)
    for row, values in enumerate(transposed):
        for column, value in enumerate(values):
            text = f"{100 * value:.0f}"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8.5, color="#14181f")
    axes.grid(visible=False)
    axes.set_xticks(
        [place + 0.5 for place in range(len(found.lengths))], [f"{length:,}" for length in found.lengths]
    )
    axes.set_yticks(
        [place + 0.5 for place in range(len(found.depths))],
        [f"{100 * depth:.0f} %" for depth in found.depths],
    )
    axes.tick_params(length=0)
    axes.invert_yaxis()
    axes.set(xlabel="tokens of the text", ylabel="depth of the needle")
    return drawn


def training_loss(members: Sequence[tuple[int, Found]]) -> "Figure | None":
    """Draw the KL on training batches against tokens, averaged over neighbours where there are many."""
    members = [(number, one) for number, one in members if one.losses]
    if not members:
        return None
    drawn, axes = figure(3.2)
    for number, one in members:
        step = max(1, len(one.losses) // _SMOOTH)
        parts = [one.losses[start : start + step] for start in range(0, len(one.losses), step)]
        tokens = [part[-1][0] for part in parts]
        values = [sum(loss for _, loss in part) / len(part) for part in parts]
        style: dict[str, Any] = {"color": series(number), "marker": "o", "markersize": 2.5, "linewidth": 1.4}
        tip(axes.plot(tokens, values, label=brief(one.label), **style), one.label)
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.xaxis.set_major_formatter(_thousands)
    axes.set(xlabel="tokens trained on", ylabel="KL on training text, nats")
    legend(drawn, axes)
    return drawn


def training_curve(one: Found) -> "Figure | None":
    """Draw the perplexity on held-out text against tokens; None where it was not measured."""
    if one.curve is None:
        return None
    drawn, axes = figure(3.2)
    source = one.curve.teacher_perplexity
    axes.axhline(source, color=LIGHT["muted"], linestyle="--", linewidth=1, label="source")
    points = [(point.tokens, point.perplexity) for point in one.curve.points]
    style: dict[str, Any] = {"color": series(0), "marker": "o", "markersize": 3.5, "linewidth": 1.4}
    tip(axes.plot(*zip(*points, strict=True), label=brief(one.label), **style), one.label)
    if max(value for _, value in points) / min(source, *(value for _, value in points)) > 2:
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    axes.xaxis.set_major_formatter(_thousands)
    axes.set(xlabel="tokens trained on", ylabel="perplexity, held-out text")
    legend(drawn, axes)
    return drawn


def decode_ratio(group: Group) -> "Figure | None":
    """Draw the decoding speed of each checkpoint relative to its source, which was timed in turns with it.

    Bars are quartiles.
    """
    lines = []
    for number, one, found in group.measured("speed", SpeedBlock):
        speedups = {(cell.batch, cell.context): cell.decode_speedup for cell in found.cells}
        lines.append((one.label, series(number), speedups))
    return _speeds(lines, "decoding speed relative to the source", level=1.0)


def decode_speed(group: Group) -> "Figure | None":
    """Draw the decoded tokens per second of each checkpoint, and of the source as timed with the first one.

    Bars are quartiles.
    """
    lines: list[tuple[str, str, dict[tuple[int, int], Quartiles | None]]] = []
    for number, one, found in group.measured("speed", SpeedBlock):
        sides = [(one.label, series(number), "student")]
        if not lines:
            sides.insert(0, ("source", LIGHT["muted"], "teacher"))
        for name, colour, role in sides:
            speeds: dict[tuple[int, int], Quartiles | None] = {}
            for cell in found.cells:
                speed = getattr(cell, role)
                speeds[cell.batch, cell.context] = None if speed is None else speed.decode.tokens_per_second
            lines.append((name, colour, speeds))
    return _speeds(lines, "decoded tokens per second")


def _speeds(
    lines: Sequence[tuple[str, str, Mapping[tuple[int, int], Quartiles | None]]],
    label: str,
    level: float | None = None,
) -> "Figure | None":
    """Draw speeds over the context, a line per batch size; a dashed line stands at `level`."""
    if not any(speed for _, _, speeds in lines for speed in speeds.values()):
        return None
    drawn, axes = figure(3.4)
    if level is not None:
        axes.axhline(level, color=LIGHT["muted"], linestyle="--", linewidth=1)
    for name, colour, speeds in lines:
        for place, batch in enumerate(sorted({batch for batch, _ in speeds})):
            points = sorted(
                (context, speed) for (b, context), speed in speeds.items() if b == batch and speed
            )
            below = [max(0.0, speed.median - speed.q1) for _, speed in points]
            above = [max(0.0, speed.q3 - speed.median) for _, speed in points]
            bars = axes.errorbar(
                [context for context, _ in points], [speed.median for _, speed in points],
                yerr=[below, above], capsize=2, elinewidth=0.8, color=colour, marker="o^sD"[place % 4],
                markersize=4, linewidth=1.4,
            )  # fmt: skip
            bars.lines[0].set_label(f"{brief(name, 24)}, batch {batch}")
            tip([bars.lines[0]], f"{name}, batch {batch}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({context for _, _, speeds in lines for _, context in speeds}))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="tokens of context", ylabel=label)
    legend(drawn, axes)
    return drawn


def _thousands(value: float, _: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"
