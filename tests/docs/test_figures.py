"""Figures are made from real folds and from measured data, and those in the repository are up to date."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.make import figures
from docs.make.drawing import Plot, draw

from ..support.shown_code import PAGES, ROOT

FROM_FOLDS = ("cache", "slots", "latent", "layers")
FROM_RESULTS = ("overview", "queries", "metric")


def test_all_figures_are_made_from_less_text(tmp_path: Path) -> None:
    figures.make(tmp_path, sequences=2, length=32, refine=2)
    assert {path.stem for path in tmp_path.glob("*.svg")} == {*FROM_FOLDS, *FROM_RESULTS}
    for file in tmp_path.glob("*.svg"):
        root = ElementTree.parse(file).getroot()
        assert root.find("{http://www.w3.org/2000/svg}title") is not None
        assert "nan" not in file.read_text(encoding="utf-8")
    assert "256 numbers" in (tmp_path / "cache.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FROM_RESULTS)
def test_committed_figures_show_the_present_results(name: str) -> None:
    drawn = getattr(figures, name)()
    kept = (figures.FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == kept, f"{name}.svg is out of date; run `python -m docs.make.figures`"


def test_every_figure_is_shown_and_every_shown_one_exists() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    shown = set(re.findall(r"figures/(\w+)\.svg", text))
    assert shown == {path.stem for path in figures.FIGURES.glob("*.svg")} == {*FROM_FOLDS, *FROM_RESULTS}


def test_points_lie_where_their_numbers_say() -> None:
    """On a logarithmic axis, equal ratios are equal distances."""
    plot = Plot(title="t", x="x", y="y", lines={"a": [(0.0, 1.0), (1.0, 10.0), (2.0, 100.0)]})
    places = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)" r="3"', draw([plot], "about"))]
    assert places[0] - places[1] == pytest.approx(places[1] - places[2], abs=0.2)
    assert places[0] > places[2]
