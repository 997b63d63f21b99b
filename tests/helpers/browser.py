"""Debian's Chromium without a screen, for the tests of the report's page."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--mute-audio"),
    "--force-color-profile=srgb",
)
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "chromium and chromium-driver are not installed: make browser"
is_there = CHROMIUM is not None and DRIVER is not None


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser of its own, with a new profile; it is closed at the end."""
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        driver.set_page_load_timeout(60)
        driver.set_script_timeout(60)
        try:
            yield driver
        finally:
            driver.quit()


def resize(driver: webdriver.Chrome, width: int, height: int, dark: bool = False) -> None:
    """Size of the page in CSS pixels, as of a desktop or a phone, and the colour scheme that the system asks for."""
    metrics = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def show(driver: webdriver.Chrome, path: Path, tab: str = "overview") -> None:
    """Opens a report from disk at one of its views."""
    driver.get("about:blank")
    driver.get(f"{path.resolve().as_uri()}#{tab}")


def errors(driver: webdriver.Chrome) -> list[str]:
    """Messages on the console since the last call, of any level."""
    return [entry["message"] for entry in driver.get_log("browser")]
