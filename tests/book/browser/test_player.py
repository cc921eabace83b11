"""Pictures that move, in a real browser: what a click, a drag, a key and a wait do; on a phone, on paper, unscripted.

The page lies in a file and holds two players, as a page of the book does, inside what the theme puts around an output.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import chromium
import pytest
from built_book import ROOT
from chromium import DESK, PHONE
from matplotlib.axes import Axes
from playwright.sync_api import Browser, Locator, Page, expect

from muonbook.figures import player, style

# What the theme does: what is hidden is gone, in dark mode outputs lie on a light slab, figures have room around them.
THEME = """
[hidden] { display: none !important; }
html[data-theme=dark] body { background: #121212; color: #ced6dd; }
html[data-theme=dark] .bd-content div.cell_output .text_html:not(:has(table.dataframe)) {
  background-color: #ced6dd; color: #222832; padding: .5rem; }
figure { padding: 8px; }
"""


def frame(number: int, caption: str = "") -> player.Frame:
    def paint(axes: Axes, top: float) -> None:
        style.box(axes, 40 * number, top, 34, 34, style.dp_colour(number), hatch="....")

    return player.Frame(style.card(f"Frame {number}", "", (200.0, paint)), f"A box at {number}.", caption)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with a player of four frames and one of two without captions, by its address on the disk."""
    path = tmp_path_factory.mktemp("player") / "page.html"
    captions = [f"Caption {number}.{' It goes on.' * 40 * (number == 2)}" for number in (1, 2, 3, 4)]
    frames = {"long": [frame(*each) for each in enumerate(captions, 1)], "short": [frame(1), frame(2)]}
    players = [player.html(name, each) for name, each in frames.items()]
    outputs = "".join(f'<div class="cell_output"><div class="output text_html">{each}</div></div>' for each in players)
    css = (ROOT / "book" / "_static" / "book.css").read_text(encoding="utf-8")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{THEME}{css}</style>'
    body = f'<body class="bd-content"><article class="bd-article">{outputs}'
    path.write_text(f'<!doctype html><html data-theme="dark">{head}{body}', "utf-8")
    return path.as_uri()


@pytest.fixture
def tab(browser: Browser, place: str) -> Iterator[Page]:
    """The page on a desk, without a network; a fault of the script, or a request, fails the test."""
    context = chromium.context(browser, viewport=DESK, offline=True)
    page, trouble = context.new_page(), []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: None if request.url == place else trouble.append(request.url))
    page.clock.install()
    page.goto(place)
    yield page
    context.close()
    assert trouble == []


def shown(page: Page, name: str) -> str:
    """Return the label of the one frame that can be seen."""
    seen = page.locator(f"#moving-{name} .moving-frames svg").locator("visible=true")
    (label,) = seen.evaluate_all("drawings => drawings.map(drawing => drawing.getAttribute('aria-label'))")
    return str(label)


def button(page: Page, words: str, name: str = "long") -> Locator:
    return page.locator(f"#moving-{name}").get_by_role("button", name=words, exact=True)


def test_a_click_moves_it_and_the_ends_are_ends(tab: Page) -> None:
    assert shown(tab, "long") == "A box at 1."
    button(tab, "Back").click(force=True)  # playwright waits for what is dimmed
    assert shown(tab, "long") == "A box at 1."
    for number in (2, 3, 4, 4):
        button(tab, "Step").click(force=True)
        assert shown(tab, "long") == f"A box at {number}."
    expect(button(tab, "Step")).to_have_attribute("aria-disabled", "true")
    expect(tab.locator("#moving-long output")).to_have_text("4 / 4")
    expect(tab.locator("#moving-long .moving-said")).to_have_text("Caption 4.")
    button(tab, "Back").click()
    assert shown(tab, "long") == "A box at 3."


def test_the_page_below_it_stays_where_it_is(tab: Page) -> None:
    stage = tab.locator("#moving-long .moving-frames")
    heights = []
    for number in (1, 2, 3):
        assert shown(tab, "long") == f"A box at {number}."
        heights.append(stage.evaluate("node => node.getBoundingClientRect().height"))
        button(tab, "Step").click()
    captions = stage.locator("p").evaluate_all("texts => texts.map(text => text.getBoundingClientRect().height)")
    assert captions[1] > 3 * captions[0]
    assert heights == heights[:1] * 3


def test_the_slider_moves_it_and_follows_it(tab: Page) -> None:
    slider = tab.locator("#moving-long input")
    slider.fill("3")
    assert shown(tab, "long") == "A box at 3."
    button(tab, "Step").click()
    expect(slider).to_have_value("4")
    expect(slider).to_have_attribute("aria-valuetext", "4 of 4")


def test_keys_move_it_wherever_the_focus_is_and_those_that_mean_something_else_do_not(tab: Page) -> None:
    expect(tab.get_by_role("group", name="Frames: arrow keys move them")).to_have_count(2)
    for focused in ("input", "button >> nth=0", ".moving-frames"):
        tab.locator("#moving-long").locator(focused).focus()
        for key, number in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", 4), ("Home", 1)):
            tab.keyboard.press(key)
            assert shown(tab, "long") == f"A box at {number}.", (focused, key)
    assert shown(tab, "short") == "A box at 1."
    for modifier in ("Shift", "Control", "Alt", "Meta"):
        tab.keyboard.press(f"{modifier}+ArrowRight")
        assert shown(tab, "long") == "A box at 1.", modifier


def test_a_key_that_it_takes_goes_no_further(tab: Page) -> None:
    """The theme turns pages by arrow keys; one that the player leaves alone is the page's."""
    tab.evaluate("document.addEventListener('keydown', event => { document.title += event.key; })")
    tab.locator("#moving-long .moving-frames").focus()
    for key in ("ArrowRight", "End", "Shift+ArrowLeft", "x"):
        tab.keyboard.press(key)
    assert tab.title() == "ShiftArrowLeftx"


def test_space_held_down_is_pressed_once(tab: Page) -> None:
    tab.locator("#moving-long .moving-frames").focus()
    for _ in range(4):  # from the second on, the browser says that the key repeats
        tab.keyboard.down(" ")
        expect(button(tab, "Pause")).to_be_visible()
    tab.keyboard.up(" ")
    tab.keyboard.press(" ")
    expect(button(tab, "Play")).to_be_visible()
    assert tab.evaluate("scrollY") == 0


def test_it_plays_when_asked_and_stops_at_the_end(tab: Page) -> None:
    tab.clock.run_for(60_000)
    assert shown(tab, "long") == "A box at 1.", "nothing moves by itself"
    button(tab, "Play").click()
    expect(button(tab, "Pause")).to_be_visible()
    tab.clock.run_for(1_500)
    assert shown(tab, "long") == "A box at 2."
    button(tab, "Pause").click()
    tab.clock.run_for(60_000)
    assert shown(tab, "long") == "A box at 2."
    tab.locator("#moving-long .moving-frames").focus()
    tab.keyboard.press(" ")
    tab.clock.run_for(60_000)
    assert shown(tab, "long") == "A box at 4."
    button(tab, "Play").click()
    assert shown(tab, "long") == "A box at 1.", "played again, it begins anew"


def test_who_wants_no_motion_is_offered_none(browser: Browser, place: str) -> None:
    context = chromium.context(browser, reduced_motion="reduce")
    page = context.new_page()
    page.clock.install()
    page.goto(place)
    expect(button(page, "Step")).to_be_visible()
    assert page.get_by_text("Play", exact=True).locator("visible=true").count() == 0
    page.locator("#moving-long .moving-frames").focus()
    page.keyboard.press(" ")
    page.clock.run_for(60_000)
    assert shown(page, "long") == "A box at 1."
    page.keyboard.press("ArrowRight")
    assert shown(page, "long") == "A box at 2."
    context.close()


def test_without_a_script_the_first_frame_is_a_picture(browser: Browser, place: str) -> None:
    context = chromium.context(browser, java_script_enabled=False)
    page = context.new_page()
    page.goto(place)
    frames = page.locator("#moving-long .moving-frames > div")
    assert [each.is_visible() for each in frames.all()] == [True, False, False, False]
    assert page.get_by_role("button").count() == 0
    context.close()


def test_on_a_phone_it_fits_and_can_be_touched(browser: Browser, place: str) -> None:
    context = chromium.context(browser, viewport=PHONE, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(place)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    parts = page.locator("#moving-long").locator("button, input")
    boxes = [box for box in (part.bounding_box() for part in parts.all()) if box]
    assert len(boxes) == 4
    assert min(min(box["width"], box["height"]) for box in boxes) >= 40
    assert len({round(box["y"]) for box in boxes}) == 1, "one line of controls"
    button(page, "Step").tap()
    assert shown(page, "long") == "A box at 2."
    context.close()


def far_below(page: Page, film: str, path: Path) -> Page:
    """Open a page on which the film lies where nobody sees it yet, and stop its clock."""
    room = '<div style="height: 2000px"></div>'
    path.write_text(f'<!doctype html><meta charset="utf-8"><body>{room}{film}{room}', "utf-8")
    chromium.stop_the_clock(page)
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("touched", ["click", "input", "keydown"])
def test_the_film_of_page_one_does_not_start_for_a_reader_who_has_touched_it(
    touched: str, browser: Browser, tmp_path: Path
) -> None:
    film = (ROOT / "book" / "figures" / "nine_moves.html").read_text(encoding="utf-8")
    context = chromium.context(browser, viewport=DESK, reduced_motion="no-preference")
    page = far_below(context.new_page(), film, tmp_path / "page.html")
    if touched == "click":
        page.locator("#moving-nine-moves button >> nth=1").dispatch_event("click")
    elif touched == "input":
        slide = "slider => { slider.value = 2; slider.dispatchEvent(new Event('input', { bubbles: true })); }"
        page.locator("#moving-nine-moves input").evaluate(slide)
    else:
        page.locator(".moving-frames").dispatch_event("keydown", {"key": "ArrowRight"})
    expect(page.locator("output")).to_have_text("2 / 10")
    page.locator(".moving-frames").evaluate("stage => stage.scrollIntoView({ block: 'center' })")
    page.clock.run_for(120_000)
    expect(page.locator("output")).to_have_text("2 / 10")
    context.close()


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_film_of_page_one_plays_once_by_itself_when_it_is_seen(
    motion: Literal["no-preference", "reduce"], browser: Browser, tmp_path: Path
) -> None:
    film = (ROOT / "book" / "figures" / "nine_moves.html").read_text(encoding="utf-8")
    context = chromium.context(browser, viewport=DESK, reduced_motion=motion)
    page = far_below(context.new_page(), film, tmp_path / "page.html")
    number, moves = page.locator("output"), motion == "no-preference"
    page.clock.run_for(60_000)
    expect(number).to_have_text("1 / 10" if moves else "5 / 10")  # out of sight it waits; where all hold the matrix
    page.locator(".moving-frames").evaluate("stage => stage.scrollIntoView({ block: 'center' })")
    if moves:
        expect(button(page, "Pause", "nine-moves")).to_be_visible()
    for _ in range(2):
        page.clock.run_for(120_000)
        expect(number).to_have_text("10 / 10" if moves else "5 / 10")
    assert page.locator(".moving-said").text_content() == "", "nothing is read out unasked"
    context.close()


def test_in_dark_mode_the_card_is_light_and_the_words_around_it_are_too(tab: Page) -> None:
    output = tab.locator(".output").first
    looks = "node => [getComputedStyle(node).backgroundColor, getComputedStyle(node).color]"
    assert output.evaluate(looks) == ["rgba(0, 0, 0, 0)", "rgb(206, 214, 221)"]
    assert button(tab, "Step").evaluate(looks) == ["rgba(0, 0, 0, 0)", "rgb(206, 214, 221)"]
    box = tab.locator("#moving-long .moving-frames svg").first.bounding_box()
    assert box is not None
    assert box["width"] == 540


def test_on_paper_every_frame_is_there(tab: Page, tmp_path: Path) -> None:
    tab.emulate_media(media="print")
    for number in (1, 2, 3, 4):
        expect(tab.locator("#moving-long").get_by_role("img", name=f"A box at {number}.")).to_be_visible()
    expect(button(tab, "Step")).to_have_count(0)


def test_a_notebook_may_put_it_in_later_and_run_the_script_again(tab: Page) -> None:
    """As Colab and Jupyter do: the HTML first, and each script once more as a new element."""
    later = player.html("later", [frame(1), frame(2)])
    put_in = """html => {
        const output = document.body.appendChild(document.createElement("div"));
        output.innerHTML = html;
        for (const script of output.querySelectorAll("script")) {
            const again = document.createElement("script");
            again.textContent = script.textContent;
            script.replaceWith(again);
        }
    }"""
    button(tab, "Step").click()
    tab.evaluate(put_in, later)
    assert (shown(tab, "long"), shown(tab, "later")) == ("A box at 2.", "A box at 1.")
    button(tab, "Step", "later").click()
    expect(tab.locator("#moving-later .moving-said")).to_have_text("A box at 2.")  # it has no caption
    button(tab, "Step").click()
    assert (shown(tab, "long"), shown(tab, "later"), shown(tab, "short")) == (
        "A box at 3.",
        "A box at 2.",
        "A box at 1.",
    )
