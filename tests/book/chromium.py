"""A real browser for the tests that look at pages as a reader does, and the two screens they look at them on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import worlds
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, expect, sync_playwright

from tools.print_book import installed_browser

PATIENCE = 300_000  # milliseconds that a page may take for anything, on a machine that is busy testing
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
# 1300 pixels, less a scrollbar, which Chromium shows to people only
DESK, PHONE = ViewportSize(width=1285, height=900), ViewportSize(width=390, height=844)


@contextmanager
def started() -> Iterator[Browser]:
    """Start the browser that is here. Without one the test is skipped."""
    path = installed_browser()
    if path is None:
        missing = "Looking at the book needs Chromium or Chrome on the PATH (Debian, Ubuntu: apt-get install chromium)."
        worlds.without("browser", missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIET)
        expect.set_options(timeout=PATIENCE)
        yield browser
        browser.close()


def context(browser: Browser, **options: Any) -> BrowserContext:
    """Return a context, as `browser.new_context` makes them, that waits long for what a page has to do."""
    made = browser.new_context(**options)
    made.set_default_timeout(PATIENCE)
    return made


def stop_the_clock(page: Page) -> None:
    """Let a page's timers stand still until `page.clock.run_for`, however slow the machine is."""
    page.clock.install(time=0)
    page.clock.pause_at(1000)
