"""A headless Chromium, and what a page did in it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

# Root has no sandbox, a container a small /dev/shm; the others keep Chromium from looking for a network.
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-sync", "--disable-quic", "--disable-background-networking", "--disable-component-update",
]  # fmt: skip


@contextmanager
def open_chromium(profile: Path) -> Iterator[Any]:
    """Open a browser with an empty profile, which keeps what it logs and what it asks for."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in [*FLAGS, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def show(chromium: Any, page: Path, width: int = 1200, scheme: str = "light", media: str = "screen") -> None:
    """Open a page from disk on a screen of some width, in a colour scheme."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    chromium.get(page.as_uri())


def ask(chromium: Any, script: str) -> Any:
    """Return the value of an expression in the page."""
    return chromium.execute_script(f"return {script}")


def external_requests(chromium: Any) -> list[str]:
    """Return the requests for something that is not on this disk, since the last call."""
    asked = [entry["message"] for entry in chromium.get_log("performance")]
    return [
        message for message in asked if '"Network.requestWillBeSent"' in message and '"url":"http' in message
    ]
