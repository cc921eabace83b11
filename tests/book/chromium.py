"""A real browser for the tests that look at pages as a reader does, and the two screens they look at them on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, ViewportSize, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
# 1300 pixels, less a scrollbar, which Chromium shows to people only
DESK, PHONE = ViewportSize(width=1285, height=900), ViewportSize(width=390, height=844)


@contextmanager
def started() -> Iterator[Browser]:
    """Start the browser that is here. Without one the test is skipped, but fails where CI=true says one is due."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        missing = "Looking at the book needs Chromium or Chrome on the PATH (Debian, Ubuntu: apt-get install chromium)."
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIET)
        yield browser
        browser.close()
