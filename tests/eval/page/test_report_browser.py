"""The page of `kvfold report` in headless Chromium: no errors, sorting, colours, a phone and paper."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ...support.browser import CHROMIUM, DRIVER, ask, external_requests, open_chromium, show
from ...support.commands import run_main
from ...support.pages import suites, write_checkpoint, write_example

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
_LACKING = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
    pytest.mark.skipif(bool(_LACKING), reason=f"the extra `report` is not installed: {_LACKING}"),
]

ENTER = "\ue007"  # as WebDriver names keys


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    long = write_checkpoint(
        root / ("a_long_name_without_any_place_to_break_it" * 3), suites(13.0, 8), source="another" * 20
    )
    run_main("report", *map(str, [*write_example(root), long]), "--out", root / "page.html")
    return root / "page.html"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def first_column(chromium: Any) -> list[str]:
    return [
        cell.text
        for cell in chromium.find_elements("css selector", "table")[0].find_elements(
            "css selector", "tbody th"
        )
    ]


def test_it_opens_without_errors_or_requests(chromium: Any, page: Path) -> None:
    show(chromium, page)
    assert chromium.get_log("browser") == []
    assert external_requests(chromium) == []
    drawn = ask(
        chromium,
        "[...document.querySelectorAll('svg')].map((svg) => svg.getBoundingClientRect()).map((r) => "
        "[r.width, r.height])",
    )
    assert len(drawn) >= 15
    assert all(width > 300 and height > 80 for width, height in drawn)


def test_a_click_and_a_key_sort(chromium: Any, page: Path) -> None:
    show(chromium, page)
    assert first_column(chromium) == ["source (source)", "half", "quarter", "distilled"]
    ratio, recovered = (
        chromium.find_element("xpath", f"(//th/button[text()='{name}'])[1]")
        for name in ("ratio to source", "recovered")
    )
    ratio.click()
    assert first_column(chromium) == [
        "half",
        "distilled",
        "quarter",
        "source (source)",
    ]  # nothing is known of the last
    ratio.send_keys(ENTER)
    assert first_column(chromium) == ["quarter", "distilled", "half", "source (source)"]
    assert ask(chromium, "document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
    recovered.send_keys(" ")
    assert first_column(chromium)[0] == "distilled"
    assert len(chromium.find_elements("css selector", "th[aria-sort]")) == 1
    chromium.find_element("xpath", "(//th/button[text()='checkpoint'])[1]").click()
    assert first_column(chromium) == ["distilled", "half", "quarter", "source (source)"]


def test_colours_follow_the_system_and_the_button(chromium: Any, page: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    text = "getComputedStyle(document.querySelector('svg text')).fill"
    show(chromium, page)
    ask(chromium, "localStorage.clear()")
    light = (ask(chromium, ground), ask(chromium, text))
    show(chromium, page, scheme="dark")
    dark = (ask(chromium, ground), ask(chromium, text))
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    button = chromium.find_element("id", "theme")
    assert button.text == "Light"
    button.click()
    assert (ask(chromium, ground), ask(chromium, text), button.text) == (*light, "Dark")
    show(chromium, page, scheme="dark")
    assert ask(chromium, ground) == light[0]  # it was kept
    chromium.find_element("id", "theme").click()
    show(chromium, page, media="print")
    assert ask(chromium, text) == light[1]  # paper is white
    assert not chromium.find_element("id", "theme").is_displayed()
    ask(chromium, "localStorage.clear()")


@pytest.mark.parametrize("width", [320, 390, 800])
def test_nothing_is_wider_than_the_screen(chromium: Any, page: Path, width: int) -> None:
    show(chromium, page, width)
    assert ask(chromium, "window.innerWidth") == width  # a phone would zoom out until everything fits
    assert ask(chromium, "document.documentElement.scrollWidth") <= width
    smallest = ask(
        chromium,
        "Math.min(...[...document.querySelectorAll('svg')].flatMap((svg) => "
        "[...svg.querySelectorAll('text')].map((text) => "
        "parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / "
        "svg.viewBox.baseVal.width)))",
    )
    assert smallest > (8 if width > 320 else 6.5)


def test_texts_of_a_figure_lie_inside_and_apart(chromium: Any, page: Path) -> None:
    """In the browser's own font, which is not the one that the figure was laid out with."""
    show(chromium, page)
    boxes = ask(
        chromium,
        "[...document.querySelectorAll('svg')].map((svg) => { const frame = svg.getBoundingClientRect(); "
        "return "
        "[...svg.querySelectorAll('text')].map((t) => { const r = t.getBoundingClientRect(); "
        "return [t.textContent, r.left - frame.left, r.top - frame.top, r.right - frame.left, r.bottom - "
        "frame.top, "
        "frame.width, frame.height]; }); })",
    )
    for figure in boxes:
        for number, (text, left, top, right, bottom, width, height) in enumerate(figure):
            assert min(left, top, width - right, height - bottom) > -2, text
            for other, left_2, top_2, right_2, bottom_2, *_ in figure[number + 1 :]:
                wide, high = min(right, right_2) - max(left, left_2), min(bottom, bottom_2) - max(top, top_2)
                assert wide < 3 or high < 5, (text, other)
