"""Figures of a fold layer by layer, from kvfold.json: planned and measured losses, spectra of the latent."""

from typing import TYPE_CHECKING

from .canvas import LIGHT, figure, legend, plain_log, series, tip
from .records import Found

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
