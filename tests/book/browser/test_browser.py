"""The book in a real browser: every page loads clean and alone, shows its formulas, cuts nothing off, and fits a phone.

Each page is opened once and asked everything: on a desk in light and dark, then at the width of a phone. What needs
content that may not be written yet (a glossary, wide tables, pictures) is tested on a small book built with the same
settings, extensions and style.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import chromium
import numpy as np
import pytest
from built_book import ROOT
from chromium import DESK, PHONE
from PIL import Image
from playwright.sync_api import Browser, Page, Request, expect

from muonbook.figures import style
from tools import set_address

CARD = 540  # pixels: how wide a figure is on a desk
READABLE = 11  # pixels: the smallest type of a figure on a phone
CHAPTER = "notebooks/07_virtual_map.html"

# Text that a reader sees outside of code and of formulas that were rendered, where no formula may be left raw.
PROSE = """() => {
    const article = (document.querySelector("article") || document.body).cloneNode(true);
    article.querySelectorAll("pre, code, script, style, mjx-container").forEach(node => node.remove());
    return article.textContent;
}"""
FORMULAS = """async () => {
    await window.MathJax?.startup?.promise;
    const count = what => document.querySelectorAll(what).length;
    return [count("article span.math, article div.math"), count("article mjx-container"), count("mjx-merror")];
}"""
TOO_WIDE = """() => document.documentElement.scrollWidth <= innerWidth ? [] :
    [...document.querySelectorAll("body *")].filter(node => node.getBoundingClientRect().right > innerWidth + 1)
        .map(node => `${node.tagName} ${node.className}`).slice(0, 5)"""
BARE_CODE = """() =>
    [...document.querySelectorAll("div.cell_input div.highlight, div.highlight-python, div.highlight-sh")]
    .filter(box => !box.querySelector("button.copybtn")).map(box => box.textContent.slice(0, 60))"""

# Everything below is asked with all folds open.
OPEN = """() => document.querySelectorAll("article details").forEach(box => { box.open = true; })"""
# Listings, outputs, tables and formulas that scroll, or are cut off: the end of them is out of sight.
CLIPPED = """() =>
    [...document.querySelectorAll("article :is(pre, table, mjx-container, .pst-scrollable-table-container)")]
    .filter(box => box.checkVisibility()).filter(box => {
        const formula = box.querySelector(":scope > mjx-math");
        if (formula) return formula.getBoundingClientRect().width > box.getBoundingClientRect().width + 1;
        return box.scrollWidth > box.clientWidth + 1;
    }).map(box => `${box.tagName} ${box.scrollWidth} > ${box.clientWidth}: ${box.textContent.trim().slice(0, 60)}`)"""
# What is nearly white in dark mode, beside the cards of figures. Small things may be: a button's dot, a mark in a text.
SLABS = """() => {
    document.documentElement.dataset.theme = "dark";
    return [...document.querySelectorAll("article, article *")].filter(box => !box.closest("img, svg")).filter(box => {
        const { width, height } = box.getBoundingClientRect();
        if (width < 60 || height < 30) return false;
        const [red, green, blue, alpha = 1] = getComputedStyle(box).backgroundColor.match(/[\\d.]+/g).map(Number);
        return alpha > 0.3 && 0.2126 * red + 0.7152 * green + 0.0722 * blue > 160;
    }).map(box => `${box.tagName} ${box.className}: ${box.textContent.trim().slice(0, 40)}`);
}"""
UNBOXED = """() => [...document.querySelectorAll("article table:not(.genindextable, .indextable)")].filter(table => {
        for (let box = table; box.tagName !== "ARTICLE"; box = box.parentElement)
            if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)) return false;
        return true;
    }).map(table => table.textContent.trim().slice(0, 60))"""
# How wide every figure is on the page, and how wide it was drawn, in points.
FIGURES = """dpi => [...document.querySelectorAll("article :is(img, .moving-frames svg)")]
    .map(figure => [figure.getBoundingClientRect().width,
        figure.tagName === "IMG" ? figure.naturalWidth / dpi * 72 : figure.viewBox.baseVal.width,
        figure.alt ?? figure.getAttribute("aria-label")])"""


class Figure(NamedTuple):
    """A figure of a page: pixels across, points across as it was drawn, and what it says in words."""

    shown: float
    drawn: float
    alt: str


class Visit(NamedTuple):
    """What one page did and showed: on a desk first, then at the width of a phone."""

    trouble: list[str]  # console errors, failed requests, requests to another host
    prose: str
    formulas: tuple[int, int, int]  # in the page, rendered, refused by MathJax
    too_wide: list[str]
    bare_code: list[str]
    colab: list[str]
    clipped: list[str]  # on a desk
    slabs: list[str]  # in dark mode
    unboxed: list[str]  # tables that would take the phone's page along when they are scrolled
    on_desk: list[Figure]
    on_phone: list[Figure]


class Silent(SimpleHTTPRequestHandler):
    """Serve files without a line per request."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a built book on a free port; yield its address, with a slash at the end."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with serve(site) as url:
        yield url


@pytest.fixture(scope="module")
def small(sample: Path) -> Iterator[str]:
    with serve(sample) as url:
        yield url


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = chromium.context(browser, viewport=DESK, color_scheme="light")
    yield context.new_page()
    context.close()


def watch(page: Page, home: str) -> list[str]:
    """Return a list that fills with whatever a page should not do, and then the next one in this tab."""
    trouble: list[str] = []
    begun: set[Request] = set()

    def request(request: Request) -> None:
        if request.is_navigation_request():
            begun.clear()  # what the page before has not loaded yet is broken off, and no fault of either
        begun.add(request)
        if not request.url.startswith((home, "data:", "blob:")):
            trouble.append(request.url)

    page.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("requestfailed", lambda request: trouble.append(f"failed: {request.url}") if request in begun else None)
    page.on("request", request)
    return trouble


def visit(page: Page, url: str, trouble: list[str]) -> Visit:
    """Open a page and ask it everything. trouble: what `watch` has returned for this tab."""
    trouble.clear()
    page.set_viewport_size(DESK)
    page.goto(url, wait_until="load")
    formulas = tuple(page.evaluate(FORMULAS))
    colab = page.eval_on_selector_all("a[href*='colab.research']", "links => links.map(link => link.href)")
    prose, bare_code = page.evaluate(PROSE), page.evaluate(BARE_CODE)
    page.evaluate(OPEN)
    clipped, on_desk = page.evaluate(CLIPPED), page.evaluate(FIGURES, style.DPI)
    slabs = page.evaluate(SLABS)
    page.set_viewport_size(PHONE)
    return Visit(
        [*trouble],
        prose,
        formulas,
        page.evaluate(TOO_WIDE),
        bare_code,
        colab,
        clipped,
        slabs,
        page.evaluate(UNBOXED),
        [Figure(*each) for each in on_desk],
        [Figure(*each) for each in page.evaluate(FIGURES, style.DPI)],
    )


def visit_all(browser: Browser, folder: Path, home: str) -> dict[str, Visit]:
    """Return what each page of a book did, by its path in the book; the redirect at the root is not a page."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.html"))]
    context = chromium.context(browser, color_scheme="light")
    page = context.new_page()  # one tab for all: each would compile every script anew, which is half of the time
    trouble = watch(page, home)
    visits = {}
    for name in names:
        if name != "index.html" and not name.startswith("_static/"):
            visits[name] = visit(page, home + name, trouble)
    context.close()
    return visits


@pytest.fixture(scope="module", params=["book", "small book"])
def visits(request: pytest.FixtureRequest, browser: Browser) -> dict[str, Visit]:
    """Every page of the book, and then of the small one."""
    names = ("site", "address") if request.param == "book" else ("sample", "small")
    return visit_all(browser, *map(request.getfixturevalue, names))


# --- Every page ---


def test_every_page_loads_clean_and_from_its_own_host(visits: dict[str, Visit]) -> None:
    assert {"book/index.html", "search.html"} <= set(visits)
    assert {name: found.trouble for name, found in visits.items() if found.trouble} == {}


def test_every_formula_is_rendered(visits: dict[str, Visit]) -> None:
    for name, found in visits.items():
        due, rendered, refused = found.formulas
        assert (rendered, refused) == (due, 0), name
        raw = re.search(r"\\[(\[]|\\(?:frac|times|top|mathrm|begin)\b|\$[^\s$][^$\n]*\$", found.prose)
        assert raw is None, f"{name}: {found.prose[raw.start() :][:60]!r}"
    assert sum(found.formulas[1] for found in visits.values()) > 3


def test_no_page_is_wider_than_a_phone(visits: dict[str, Visit]) -> None:
    assert {name: found.too_wide for name, found in visits.items() if found.too_wide} == {}


def test_nothing_is_clipped_on_a_desk(visits: dict[str, Visit]) -> None:
    assert {name: found.clipped for name, found in visits.items() if found.clipped} == {}


def test_a_table_scrolls_in_its_own_box(visits: dict[str, Visit]) -> None:
    assert {name: found.unboxed for name, found in visits.items() if found.unboxed} == {}


def test_the_dark_mode_has_no_white_slabs(visits: dict[str, Visit]) -> None:
    assert {name: found.slabs for name, found in visits.items() if found.slabs} == {}


def test_the_smallest_type_of_a_figure_can_be_read_on_a_phone(visits: dict[str, Visit]) -> None:
    """A figure has no type below style.SMALL, or it could not be drawn."""
    for name, found in visits.items():
        small = [figure for figure in found.on_phone if style.SMALL * figure.shown / figure.drawn < READABLE]
        assert small == [], name
        assert [figure for figure in found.on_desk if figure.shown > CARD] == [], name
    assert sum(len(found.on_phone) for found in visits.values()) > 1


def test_a_folded_cell_says_what_is_inside(visits: dict[str, Visit]) -> None:
    for name, found in visits.items():
        assert not re.search(r"(?:Show|Hide) code cell", found.prose), name


def test_code_can_be_copied(visits: dict[str, Visit]) -> None:
    assert {name: found.bare_code for name, found in visits.items() if found.bare_code} == {}


def test_an_example_is_copied_without_its_prompts_and_what_it_prints(browser: Browser, address: str) -> None:
    context = chromium.context(browser, viewport=DESK, permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(f"{address}book/api.html")
    box = page.locator("div.highlight", has_text="for group in split_parameters(model)")
    box.hover()
    box.locator("button.copybtn").click()
    expect(box.locator("button.copybtn")).to_have_class(re.compile("success"))
    copied = page.evaluate("navigator.clipboard.readText()")
    context.close()
    assert copied.startswith("import torch\nfrom distmuon import split_parameters\n")
    assert copied.endswith('\n    print(group["algorithm"], [name for name, _ in group["params"]])')


def test_every_chapter_opens_itself_in_colab(visits: dict[str, Visit]) -> None:
    here = set_address.current(ROOT)
    for name, found in visits.items():
        if name.startswith("notebooks/"):
            notebook = name.replace(".html", ".ipynb")
            (link,) = set(found.colab)
            assert link in (here.colab(notebook), here.colab(notebook, "published")), (
                name
            )  # the latter in the small book
            least = 1 + (here.host == set_address.GITHUB)
            assert len(found.colab) >= least, f"{name} needs the theme's button and a link in its text"


# --- What a reader does ---


def test_search_finds_newton_schulz_however_it_is_typed(page: Page, address: str, site: Path) -> None:
    pages = [*(site / "book").glob("*.html"), *(site / "notebooks").glob("*.html")]
    due = {path.relative_to(site).as_posix() for path in pages if "Newton–Schulz" in said(path)}
    assert due
    for words in ("Newton–Schulz", "newton schulz"):
        page.goto(f"{address}book/index.html")
        page.keyboard.press("Control+k")
        page.keyboard.type(words)
        page.keyboard.press("Enter")
        expect(page.locator("#search-results")).to_contain_text("Search finished")
        links = page.locator("#search-results li a").evaluate_all("links => links.map(link => link.pathname.slice(1))")
        assert due <= set(links), words


def said(path: Path) -> str:
    """Return the text of a page's article, with its tags."""
    return re.sub(r"\A.*?<article|</article>.*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("place", [CHAPTER, "book/index.html"])
def test_the_dark_mode_turns_the_cards_of_figures_dark(place: str, page: Page, small: str) -> None:
    page.goto(small + place)
    figure = page.locator("article img").first
    assert figure.evaluate("image => image.complete && image.clientWidth") == CARD
    modes, corners, cards = [], set(), {}
    for _ in range(3):
        page.locator("button.theme-switch-button").locator("visible=true").click()
        page.mouse.move(0, 0)
        mode = page.locator("html").get_attribute("data-theme")
        modes.append(mode)
        pixels = np.asarray(Image.open(BytesIO(figure.screenshot())).convert("L"))  # rows x columns, 0 is black
        cards[mode] = pixels[len(pixels) // 2, 12]
        corners.add((mode, bool(pixels[0, 0] < 60)))
    assert set(modes) == {"light", "dark"}
    assert cards["light"] > 240, "a card is as light as it was drawn"
    assert cards["dark"] < 48, "and no lighter than the page, where the page is dark"
    assert corners == {("light", False), ("dark", True)}, "around its rounded corners the page shows"


def test_a_card_opens_on_hover_stays_under_the_pointer_and_closes(page: Page, small: str) -> None:
    trouble = watch(page, small)
    page.goto(f"{small}book/index.html")
    word, card = page.locator("a.glossary-term", has_text="shard").first, page.locator(".glossary-card")
    word.hover()
    expect(card).to_have_text(re.compile(r"^\s*shard\s*The .* piece of a bucket, numbered from <0>\.\s*$"))
    expect(card.locator("mjx-container")).to_be_visible()  # on a page without a formula of its own
    card.hover()
    page.wait_for_timeout(400)
    expect(card).to_be_visible()
    page.mouse.move(0, 0)
    expect(card).to_have_count(0)
    word.hover()
    expect(card).to_be_visible()
    page.keyboard.press("Escape")
    expect(card).to_have_count(0)
    assert trouble == []


def test_a_card_opens_on_keyboard_focus_and_is_announced(page: Page, small: str) -> None:
    page.goto(small + CHAPTER)
    words, card = page.locator("a.glossary-term"), page.locator(".glossary-card")
    words.nth(0).focus()
    expect(card).to_contain_text("A contiguous run")
    assert words.nth(0).get_attribute("aria-describedby") == card.get_attribute("id")
    words.nth(2).focus()
    expect(card).to_have_count(1)
    expect(card).to_contain_text("One process.")
    page.keyboard.press("Escape")
    expect(card).to_have_count(0)
    assert page.evaluate("document.activeElement.textContent") == "rank"


def test_a_card_is_dark_in_dark_mode(browser: Browser, small: str) -> None:
    context = chromium.context(browser, viewport=DESK, color_scheme="dark")
    page = context.new_page()
    page.goto(small + CHAPTER)
    page.locator("a.glossary-term").first.focus()
    colours = page.locator(".glossary-card").evaluate(
        "card => [getComputedStyle(card).backgroundColor, getComputedStyle(card.querySelector('.popover-body')).color]"
    )
    paper, ink = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert paper < 200 < 500 < ink
    context.close()


def test_a_tap_follows_the_link_without_a_card(browser: Browser, small: str) -> None:
    context = chromium.context(browser, viewport=PHONE, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(small + CHAPTER)
    page.locator("a.glossary-term").first.tap()
    page.wait_for_url("**/book/glossary.html#term-bucket")
    assert page.locator(".glossary-card").count() == 0
    context.close()


def test_a_puzzles_box_is_ticked_by_keyboard_counted_and_remembered(page: Page, small: str) -> None:
    trouble = watch(page, small)
    page.goto(f"{small}book/puzzles.html", wait_until="networkidle")
    box, count = page.get_by_label("Solved: fetch, chapter 7"), page.get_by_role("status").locator("visible=true")
    expect(count).to_have_text("You have solved 0 of 2.")
    box.focus()
    page.keyboard.press("Space")
    expect(count).to_have_text("You have solved 1 of 2.")
    page.reload(wait_until="networkidle")
    expect(box).to_be_checked()
    expect(page.get_by_label("Solved: cut_it, chapter 7")).not_to_be_checked()
    box.uncheck()
    page.reload(wait_until="networkidle")
    expect(box).not_to_be_checked()
    page.evaluate("localStorage.setItem('muon-at-scale.puzzles', 'not a list')")
    page.reload(wait_until="networkidle")
    expect(count).to_have_text("You have solved 0 of 2.")
    assert trouble == []


def test_a_puzzles_box_works_where_the_browser_stores_nothing(browser: Browser, small: str) -> None:
    context = chromium.context(browser, viewport=PHONE)
    refuse = "{ get() { throw new DOMException('refused', 'SecurityError'); } }"
    context.add_init_script(f"Object.defineProperty(window, 'localStorage', {refuse})")
    page = context.new_page()
    page.goto(f"{small}book/puzzles.html")
    page.get_by_label("Solved: cut_it, chapter 7").check()
    expect(page.get_by_role("status").locator("visible=true")).to_have_text("You have solved 1 of 2.")
    context.close()


def test_a_page_opened_from_the_disk_is_the_same_page(page: Page, sample: Path) -> None:
    home = sample.as_uri()
    found = visit(page, f"{home}/{CHAPTER}", watch(page, home))
    assert found.trouble == []
    assert found.formulas[0] == found.formulas[1] > 0
    page.set_viewport_size(DESK)
    page.locator("a.glossary-term").first.hover()
    expect(page.locator(".glossary-card")).to_contain_text("A contiguous run")


def test_on_paper_there_is_the_text_alone_and_nothing_is_folded(page: Page, small: str) -> None:
    page.goto(small + CHAPTER)
    page.emulate_media(media="print")
    for gone in (".bd-sidebar-primary", ".prev-next-footer", ".theme-switch-button", "button.copybtn"):
        assert page.locator(gone).locator("visible=true").count() == 0, gone
    expect(page.locator("details", has_text="How many bytes?").locator("p")).to_be_visible()
    output = page.locator("div.cell_output pre").first
    assert output.evaluate("pre => pre.scrollWidth <= pre.clientWidth"), "long lines wrap on paper"
