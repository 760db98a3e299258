"""Lines over lengths as one self-contained SVG, both axes logarithmic, panels side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP = 360, 260, 64, 40  # of a panel's plotting area, and its margins, pixels
LINE = 18  # height of a legend's line
# Okabe and Ito's colours, which colour-blind readers can distinguish; dashes distinguish colours that repeat.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        title: what is drawn, with its unit.
        lines: of each name its points, x and y above zero.
    """

    title: str
    lines: dict[str, list[tuple[float, float]]]


def draw(panels: Sequence[Panel]) -> str:
    """Draw an SVG document with a legend below; names have one look in all panels."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    width = len(panels) * (WIDTH + LEFT + 24)
    height = HEIGHT + 2 * TOP + 24 + LINE * len(names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * (WIDTH + LEFT + 24) + LEFT},{TOP})">')
        parts += [*_panel(panel, names), "</g>"]
    for row, name in enumerate(names):
        y = HEIGHT + 2 * TOP + LINE * row
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + 30}" y2="{y}" {_look(row)}/>')
        parts.append(f'<text x="{LEFT + 38}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, names: list[str]) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    x_range, y_range = (_range([point[axis] for point in points]) for axis in (0, 1))

    def at(x: float, y: float) -> tuple[float, float]:
        return _share(x, x_range) * WIDTH, HEIGHT - _share(y, y_range) * HEIGHT

    parts = [f'<text x="0" y="-14" font-weight="bold">{escape(panel.title)}</text>']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>')
    for x in sorted({point[0] for point in points}):
        place = at(x, y_range[0])[0]
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT + 16}" text-anchor="middle">{x:,.0f}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 32}" text-anchor="middle">tokens</text>')
    low = math.ceil(math.log10(y_range[0]))
    high = math.floor(math.log10(y_range[1]))
    ticks = [10.0**power for power in range(low, high + 1)]
    for y in ticks if len(ticks) > 1 else y_range:
        place = at(x_range[0], y)[1]
        parts.append(f'<line x1="0" x2="{WIDTH}" y1="{place:.1f}" y2="{place:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="-6" y="{place + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    for name, line in panel.lines.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in sorted(line)))
        parts.append(f'<polyline points="{path}" fill="none" {_look(names.index(name))}/>')
    return parts


def _look(number: int) -> str:
    dashes = ("", ' stroke-dasharray="6 3"', ' stroke-dasharray="2 3"')[number // len(COLOURS) % 3]
    return f'stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="2"{dashes}'


def _range(values: list[float]) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    return (low, high) if low < high else (low / 2, high * 2)


def _share(value: float, limits: tuple[float, float]) -> float:
    return math.log(value / limits[0]) / math.log(limits[1] / limits[0])
