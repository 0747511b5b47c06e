"""A headless Chromium for tests of pages, or the reason for its absence."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


def why_not():
    """Reason why no browser is available; ``None`` if one is."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    if not any(map(shutil.which, NAMES)):
        return "there is no Chromium: apt-get install chromium"
    return None if shutil.which("chromedriver") else "no chromedriver: install chromium-driver"


@contextmanager
def open_browser():
    """A browser driver, closed afterwards; skips the test if there is none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = next(filter(None, map(shutil.which, NAMES)))
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(20)
        driver.set_script_timeout(10)
        yield driver
    finally:
        driver.quit()


def show(driver, path, width=1200, height=900):
    """Open a file in a window of this size; returns the browser's errors."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(path.resolve().as_uri())
    # Entries of rendering are hints of the browser on speed, which it gives at times.
    found = [entry for entry in driver.get_log("browser") if entry["source"] != "rendering"]
    return [entry["message"] for entry in found]
