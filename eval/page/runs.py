"""Figures of needles, distillation, speed, and of a fold layer by layer."""

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


_SHOWN = 1e-7  # relative to the largest cost; smaller ones are rounding


def losses_by_layer(one: Found, number: int) -> "Figure | None":
    """Draw the planned loss of each layer, and its loss alone on held-back calibration text."""
    lines = {
        "planned": [layer.planned and sum(layer.planned.values()) for layer in one.layers],
        "measured, closed form": [layer.measured and layer.measured.get("folded") for layer in one.layers],
        "measured, as written": [layer.measured and layer.measured.get("refined") for layer in one.layers],
    }
    if not any(value is not None for values in lines.values() for value in values):
        return None
    from matplotlib.ticker import MaxNLocator

    drawn, axes = figure()
    looks = ((LIGHT["muted"], ":", "s"), (series(number), "--", "o"), (series(number), "-", "^"))
    for (name, values), (colour, line, marker) in zip(lines.items(), looks, strict=True):
        known = [(layer, value) for layer, value in enumerate(values) if value is not None]
        if known:
            drawn_line = axes.plot(
                *zip(*known, strict=True),
                marker=marker, linestyle=line, markersize=3.5, linewidth=1.4, color=colour, label=name,
            )  # fmt: skip
            tip(drawn_line, name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="layer", ylabel="loss, nats per token")
    legend(drawn, axes)
    return drawn


def spectra(one: Found) -> "Figure | None":
    """Draw the cost of leaving out each direction of a layer's keys and values.

    The latent keeps the directions left of the dotted line.
    """
    layers = [
        (number, layer.spectrum) for number, layer in enumerate(one.layers) if layer.spectrum is not None
    ]
    if not layers:
        return None
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    drawn, axes = figure()
    # Both ends are visible on white and on black.
    colours = LinearSegmentedColormap.from_list("layers", ["#2f7fc4", "#9c6fb0", "#e0743c"])
    scale = Normalize(0, max(1, len(one.layers) - 1))
    top = max(max(spectrum.cost) for _, spectrum in layers)
    for number, spectrum in layers:
        shown = [
            (i, cost) for i, cost in zip(spectrum.index, spectrum.cost, strict=False) if cost > top * _SHOWN
        ]
        if shown:
            tip(
                axes.plot(*zip(*shown, strict=True), color=colours(scale(number)), linewidth=1.3),
                f"layer {number}",
            )
    rank = one.target.get("kv_lora_rank")
    if isinstance(rank, int):
        axes.axvline(rank + 0.5, color=LIGHT["ink"], linestyle=":", linewidth=1.2)
        axes.annotate(f" rank {rank}", (rank + 0.5, 0.98), xycoords=("data", "axes fraction"), va="top")
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    if max(spectrum.size for _, spectrum in layers) > 256:
        axes.set_xscale("log")
        plain_log(axes.xaxis)
    unit = "nats per token" if (one.record or {}).get("calibration") else "from weights alone"
    axes.set(xlabel="direction, the costliest first", ylabel=f"cost of leaving it out, {unit}")
    if len(layers) > 1:
        bar = drawn.colorbar(ScalarMappable(scale, colours), ax=axes, label="layer", pad=0.02, aspect=30)
        bar.outline.set_visible(False)
        bar.locator = MaxNLocator(integer=True)
    return drawn
