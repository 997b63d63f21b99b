"""Debian's Chromium without a screen, for the tests of the report's page."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--mute-audio"),
    "--force-color-profile=srgb",
)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
IS_NEEDED = bool(os.environ.get("NEEDS_BROWSER"))  # as in CI: without one the tests fail
MISSING = "chromium and chromium-driver are not installed: make browser"
WAIT_S = 30
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


def until(driver: webdriver.Chrome, script: str, *values: object) -> object:
    """Waits until an expression of JavaScript is true; its value."""
    return WebDriverWait(driver, WAIT_S, 0.05).until(lambda d: d.execute_script(f"return {script}", *values))


def css(driver: webdriver.Chrome, selector: str) -> WebElement:
    """The first element of a selector."""
    return driver.find_element("css selector", selector)


def count(driver: webdriver.Chrome, selector: str) -> int:
    """Number of elements of a selector."""
    return len(driver.find_elements("css selector", selector))


# Milliseconds from an action to the second frame after it, in which its effect is on the screen.
TIMED = """
const done = arguments[arguments.length - 1];
const began = performance.now();
new Function(arguments[0])();
requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - began)));
"""
_CHANGE = (
    "const e = document.querySelector('{0}'); e.value = '{1}'; e.dispatchEvent(new Event('{2}', {{bubbles: true}}));"
)
INTERACTIONS = {
    "curves": "document.querySelector('#tab-curves').click()",
    "smoothing": _CHANGE.format("#smoothing", "20", "change"),
    "pipeline": "document.querySelector('#tab-pipeline').click()",
    "zoom": "document.querySelector('.gantt button').click()",
    "another part": _CHANGE.format(".part", "3", "change"),
    "rollouts": "document.querySelector('#tab-rollouts').click()",
    "filter": _CHANGE.format("#min-reward", "1", "input"),
    "search": _CHANGE.format("#text", "word", "input"),
    "colours": _CHANGE.format("#mode", "entropy", "change"),
    "another group": "document.querySelectorAll('.entry')[20].click()",
    "compare": "document.querySelector('#tab-compare').click()",
    "theme": _CHANGE.format("#theme", "dark", "change"),
}
