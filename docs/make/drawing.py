"""Figures as SVG text: plots of points and lines side by side, and rows of boxes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 250, 200  # of a plot's area, pixels
LEFT, RIGHT, TOP, BOTTOM, LINE = 78, 14, 34, 44, 18
# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot.

    Attributes:
        title: above the plot.
        x, y: what the axes show, with units.
        lines: points of each name; equal names in several plots have one colour.
        log_x, log_y: whether an axis is logarithmic.
        ticks: names of places on the x axis; None: the values of the points.
        joined: whether points are joined by lines.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    log_x: bool = False
    log_y: bool = True
    ticks: Mapping[float, str] | None = None
    joined: bool = True


def frame(width: float, height: float, parts: Sequence[str], about: str) -> str:
    """Return an SVG document on white ground; `about` is its description for screen readers."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style} role="img"><title>{escape(about)}</title>'
    ground = f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def draw(plots: Sequence[Plot], about: str) -> str:
    """Return plots next to each other, with a legend below."""
    names = list(dict.fromkeys(name for plot in plots for name in plot.lines))
    step = LEFT + WIDTH + RIGHT
    parts = []
    for number, plot in enumerate(plots):
        parts += [f'<g transform="translate({number * step + LEFT},{TOP})">', *_plot(plot, names), "</g>"]
    start = TOP + HEIGHT + BOTTOM
    columns = max(1, 2 * len(plots) - 1)
    for number, name in enumerate(names if len(names) > 1 else []):
        x = LEFT + (number % columns) * (len(plots) * step - LEFT) / columns
        y = start + LINE * (number // columns) + 10
        parts.append(f'<circle cx="{x:.0f}" cy="{y - 4}" r="4" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{x + 10:.0f}" y="{y}">{escape(name)}</text>')
    rows = math.ceil(len(names) / columns) if len(names) > 1 else 0
    return frame(len(plots) * step, start + LINE * rows, parts, about)


def _plot(plot: Plot, names: Sequence[str]) -> list[str]:
    every = [point for points in plot.lines.values() for point in points]
    place_x = _scale([point[0] for point in every], WIDTH, plot.log_x)
    place_y = _scale([point[1] for point in every], HEIGHT, plot.log_y)
    parts = [
        f'<text x="{WIDTH / 2}" y="-12" text-anchor="middle" font-weight="bold">{escape(plot.title)}</text>'
    ]
    for value in _ticks([point[1] for point in every], plot.log_y):
        y = HEIGHT - place_y(value)
        parts.append(f'<line x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    ticks = plot.ticks or {value: f"{value:g}" for value in _ticks([point[0] for point in every], plot.log_x)}
    for value, name in ticks.items():
        parts.append(
            f'<text x="{place_x(value):.1f}" y="{HEIGHT + 17}" text-anchor="middle">{escape(name)}</text>'
        )
    for name, points in plot.lines.items():
        colour = COLOURS[names.index(name)]
        places = [(place_x(x), HEIGHT - place_y(y)) for x, y in points]
        if plot.joined and len(places) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 36}" text-anchor="middle">{escape(plot.x)}</text>')
    middle = f"translate({12 - LEFT},{HEIGHT / 2}) rotate(-90)"
    parts.append(f'<text transform="{middle}" text-anchor="middle">{escape(plot.y)}</text>')
    return parts


class _scale:
    """A function from values to pixels, with a margin at both ends."""

    def __init__(self, values: Sequence[float], size: float, log: bool) -> None:
        self.log, self.size = log, size
        ends = [self._of(value) for value in (min(values), max(values))]
        margin = 0.06 * (ends[1] - ends[0] or 1.0)
        self.low, self.high = ends[0] - margin, ends[1] + margin

    def _of(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def __call__(self, value: float) -> float:
        return (self._of(value) - self.low) / (self.high - self.low) * self.size


def _ticks(values: Sequence[float], log: bool) -> list[float]:
    """Return between three and eight round values within the range of some values."""
    low, high = min(values), max(values)
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            found = [factor * 10.0**power for power in decades for factor in factors]
            found = [value for value in found if low <= value <= high]
            if len(found) >= 3:
                return found
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 7)
    return [round(step * number, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def boxes(rows: Sequence[tuple[str, Sequence[tuple[str, float]], str]], about: str) -> str:
    """Return rows of boxes as wide as their numbers.

    Args:
        rows: a name, the boxes of a row with their names and numbers, and what is written behind them.
        about: the description.
    """
    unit = 500 / max(sum(number for _, number in parts) for _, parts, _ in rows)
    drawn = []
    for place, (name, parts, behind) in enumerate(rows):
        y, x = 14 + 44 * place, 110.0
        drawn.append(f'<text x="100" y="{y + 21}" text-anchor="end" font-weight="bold">{escape(name)}</text>')
        for label, number in parts:
            colour = COLOURS[("keys", "values", "latent", "rotary key").index(label.split(",")[0])]
            width = number * unit
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="32" fill="{colour}" '
                f'fill-opacity="0.25" stroke="{colour}"/>'
            )
            if width > 5.5 * len(label):
                middle = x + width / 2
                drawn.append(
                    f'<text x="{middle:.1f}" y="{y + 21}" text-anchor="middle">{escape(label)}</text>'
                )
            x += width
        drawn.append(f'<text x="{x + 8:.1f}" y="{y + 21}">{escape(behind)}</text>')
    return frame(740, 14 + 44 * len(rows), drawn, about)
