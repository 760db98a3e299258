"""The built site in headless Chromium, from disk: no errors, no requests, search, colours, a phone."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.make.site import SITE

from ..support.browser import CHROMIUM, DRIVER, ask, external_requests, open_chromium, show

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
PAGES = sorted(path.relative_to(SITE) for path in SITE.rglob("*.html"))
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
    pytest.mark.skipif(not PAGES, reason="build/site is missing; run `make docs`"),
]

SHADOW = "[...document.querySelectorAll('*')].map((element) => element.shadowRoot).find((root) => root)"
PATIENCE = 10.0  # seconds for a search


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_chromium(tmp_path_factory.mktemp("profile")) as driver:
        # Every visit is the first: a colour scheme that was stored on the last one is forgotten.
        forget = {"source": "localStorage.clear()"}
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", forget)
        yield driver


def test_pages_open_without_errors_or_requests(chromium: Any) -> None:
    assert len(PAGES) >= 10
    for page in PAGES:
        show(chromium, SITE / page)
        assert chromium.get_log("browser") == [], page
        assert external_requests(chromium) == [], page
        missing = ask(chromium, "[...document.images].filter((i) => !i.naturalWidth).map((i) => i.src)")
        assert missing == [], page


def search(chromium: Any, words: str) -> list[str]:
    """Type into the search of the open page; returns the addresses that it finds."""
    chromium.find_element("css selector", "button.md-search__button").click()
    end = time.monotonic() + PATIENCE
    found: list[str] = []
    while not found and time.monotonic() < end:
        field = ask(chromium, f"{SHADOW}?.querySelector('input')")
        if field is not None and field.get_attribute("value") != words:
            field.send_keys(words)
        time.sleep(0.1)
        found = ask(chromium, f"[...({SHADOW}?.querySelectorAll('li a') ?? [])].map((link) => link.href)")
    return found


def test_search_works_from_disk(chromium: Any) -> None:
    show(chromium, SITE / "index.html")
    found = [
        Path(address.partition("?")[0].partition("#")[0]).name for address in search(chromium, "kv_lora_rank")
    ]
    assert {"commands.html", "api.html"} <= set(found)
    assert chromium.get_log("browser") == []
    assert external_requests(chromium) == []


def test_colours_follow_the_system_and_the_button(chromium: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    show(chromium, SITE / "index.html")
    light = ask(chromium, ground)
    show(chromium, SITE / "index.html", scheme="dark")
    dark = ask(chromium, ground)
    assert light != dark
    labels = chromium.find_elements("css selector", "label[for^='__palette_']")
    next(label for label in labels if label.is_displayed()).click()
    assert ask(chromium, ground) == light


@pytest.mark.parametrize("width", [360, 800])
def test_no_page_is_wider_than_the_screen(chromium: Any, width: int) -> None:
    for page in PAGES:
        show(chromium, SITE / page, width)
        assert ask(chromium, "document.documentElement.scrollWidth") <= width, page
