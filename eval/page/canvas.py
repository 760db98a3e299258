"""Figures by matplotlib, as SVG in the colours of the page and as PNG in light colours.

A figure is drawn once, in the colours of `LIGHT`. In the SVG each colour becomes a variable of the page's
style, so that the same picture suits the dark page, the light page and paper. Texts remain texts, so that
they can be read aloud, searched and copied.
"""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT = {
    "surface": "#ffffff",
    "page": "#f3f5f8",
    "ink": "#1b2330",
    "muted": "#5c6675",
    "rule": "#d5dbe4",
    "link": "#1f5fae",
    "c0": "#2563a9",
    "c1": "#c2410d",
    "c2": "#15803e",
    "c3": "#7e3795",
    "c4": "#97650a",
    "c5": "#0e7491",
    "c6": "#be185e",
    "c7": "#4b5564",
}
DARK = {
    "surface": "#171c24",
    "page": "#0e1218",
    "ink": "#e7eaef",
    "muted": "#a2acba",
    "rule": "#364050",
    "link": "#8abbf5",
    "c0": "#7db5f1",
    "c1": "#fb9b6b",
    "c2": "#6fd18c",
    "c3": "#cf9ce7",
    "c4": "#e0ba5c",
    "c5": "#63ccdd",
    "c6": "#f38cb8",
    "c7": "#b5bdc9",
}
_SERIES = [name for name in LIGHT if re.fullmatch(r"c\d", name)]
_WIDTH = 4.1  # inches; narrow, so that texts remain legible on a phone
# The first is what matplotlib measures with, the second is as wide.
_FONT = "DejaVu Sans, Verdana, sans-serif"


def series(number: int) -> str:
    """Return the colour of a line or bar; after the last colour they repeat."""
    return LIGHT[_SERIES[number % len(_SERIES)]]


@contextmanager
def styled() -> Iterator[None]:
    """Apply the style of the page to every figure drawn inside the context."""
    import matplotlib

    with matplotlib.rc_context(_style()):
        yield


def figure(height: float = 3.1) -> "tuple[Figure, Axes]":
    """Return an empty figure with one pair of axes, not bound to any window system; `height` in inches."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = drawn.add_subplot()
    axes.set_axisbelow(True)
    return drawn, axes


def _style() -> dict[str, Any]:
    ink, muted, rule = LIGHT["ink"], LIGHT["muted"], LIGHT["rule"]
    return {
        "font.size": 9,
        "axes.labelsize": 9,
        "text.parse_math": False,  # a dollar sign in a directory's name is shown as it is
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "legend.handlelength": 1.6,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": muted,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "axes.grid": True,
        "grid.color": rule,
        "grid.linewidth": 0.6,
        "figure.facecolor": LIGHT["surface"],
        "axes.facecolor": LIGHT["surface"],
    }


def legend(drawn: "Figure", axes: "Axes") -> None:
    """Add a legend below the axes, where it hides nothing; it has two columns unless a name is long."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        # The height of a line.
        drawn.set_figheight(drawn.get_figheight() + 0.17 * max(0, len(names) // 2 - 2))
        columns = 1 if max(map(len, names)) > 22 else 2
        drawn.legend(handles, names, loc="outside lower center", ncols=columns)


def brief(name: str, most: int = 36) -> str:
    """Return a name shortened to fit into a figure.

    A name with a leading underscore gets a prefix, since matplotlib leaves such names out of the legend.
    """
    name = f"./{name}" if name.startswith("_") else name
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"


def plain_log(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers, between the powers too where there is room."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    narrow = high / max(low, 1e-300) < 30
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if narrow else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axis.set_minor_locator(NullLocator())


def to_svg(drawn: "Figure", title: str) -> str:
    """Return the figure as an element of an HTML page, without size, date or ids of its own."""
    import matplotlib

    file = io.StringIO()
    with _any_script(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvfold"}):
        drawn.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for pattern in (r"<metadata>.*?</metadata>", r"<style[^>]*>.*?</style>", r"<!--.*?-->"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    text = re.sub(r'<g id="tip: ([^"]*)">', r"<g><title>\1</title>", text)
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r"(font: [^;\"]*?)'DejaVu Sans'[^;\"]*", rf"\1{_FONT}", text)
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    head = re.match(r"<svg[^>]*>", text)
    box = re.search(r'viewBox="([^"]*)"', text)
    assert head is not None
    assert box is not None
    opening = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{box[1]}" role="img" aria-label="{escape(title)}">'
    )
    return opening + re.sub(r"\s*\n\s*", "\n", text[head.end() :]).strip()


def write_png(drawn: "Figure", path: Path) -> None:
    """Write the figure as a PNG in light colours, about 900 pixels wide."""
    with _any_script():
        drawn.savefig(path, dpi=220, metadata={"Software": None})


@contextmanager
def _any_script() -> Iterator[None]:
    """Ignore warnings of letters that the font lacks; the browser has other fonts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def tip(artists: Any, text: str) -> None:
    """Give artists a tooltip."""
    for artist in artists if isinstance(artists, Sequence) else [artists]:
        if hasattr(artist, "set_gid"):
            artist.set_gid(f"tip: {text}")
