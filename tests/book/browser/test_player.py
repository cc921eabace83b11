"""Pictures that move, in a real browser: what a click, a drag, a key and a wait do; on a phone, on paper, unscripted.

The page lies in a file and holds two players, as a page of the book does, inside what the theme puts around an output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def test_two_players_know_nothing_of_each_other(tab: Page) -> None:
    button(tab, "Step").click()
    assert (shown(tab, "long"), shown(tab, "short")) == ("A box at 2.", "A box at 1.")
    button(tab, "Step", "short").click()
    expect(tab.locator("#moving-short .moving-said")).to_have_text("A box at 2.")  # it has no caption
    button(tab, "Back").click()
    assert (shown(tab, "long"), shown(tab, "short")) == ("A box at 1.", "A box at 2.")


def test_the_slider_moves_it_and_follows_it(tab: Page) -> None:
    slider = tab.locator("#moving-long input")
    slider.fill("3")
    assert shown(tab, "long") == "A box at 3."
    button(tab, "Step").click()
    expect(slider).to_have_value("4")
    expect(slider).to_have_attribute("aria-valuetext", "4 of 4")


@pytest.mark.parametrize("focused", [".moving-frames", "input", "button >> nth=0"])
def test_keys_move_it_wherever_the_focus_is(focused: str, tab: Page) -> None:
    expect(tab.get_by_role("group", name="Frames: arrow keys move them")).to_have_count(2)
    tab.locator("#moving-long").locator(focused).focus()
    for key, number in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", 4), ("Home", 1)):
        tab.keyboard.press(key)
        assert shown(tab, "long") == f"A box at {number}.", key
    assert shown(tab, "short") == "A box at 1."


def test_keys_that_mean_something_else_are_left_alone(tab: Page) -> None:
    tab.locator("#moving-long .moving-frames").focus()
    for modifier in ("Shift", "Control", "Alt", "Meta"):
        tab.keyboard.press(f"{modifier}+ArrowRight")
        assert shown(tab, "long") == "A box at 1.", modifier


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
    page.goto(place)
    expect(button(page, "Step")).to_be_visible()
    assert page.get_by_text("Play", exact=True).locator("visible=true").count() == 0
    page.locator("#moving-long .moving-frames").focus()
    page.keyboard.press(" ")
    assert shown(page, "long") == "A box at 1."
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


# --- One that plays once by itself ---

ROOM = 2_000  # pixels of page above and below it


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with a player far down that plays by itself, and whose third frame of four is its still one."""
    path = tmp_path_factory.mktemp("alone") / "page.html"
    made = player.html("long", [frame(number, f"Caption {number}.") for number in (1, 2, 3, 4)], still=2)
    room = f'<div style="height: {ROOM}px"></div>'
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{THEME}</style>'
    path.write_text(f"<!doctype html><html>{head}<body>{room}{made}{room}", "utf-8")
    return path.as_uri()


@contextmanager
def opened(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """The page in a tab whose clock stands still until it is told to run."""
    context = chromium.context(browser, viewport=DESK, **options)
    page = context.new_page()
    chromium.stop_the_clock(page)
    page.goto(address)
    yield page
    context.close()


def come_to_it(page: Page) -> None:
    """Scroll to the player, and let the browser see that it is in view: it says so a frame or two later."""
    page.locator("#moving-long .moving-frames").evaluate("stage => stage.scrollIntoView({ block: 'center' })")
    page.evaluate(NOTICED, True)


def leave_it(page: Page) -> None:
    """Scroll away from the player, and let the browser see that."""
    page.evaluate("scrollTo(0, 0)")
    page.evaluate(NOTICED, False)


# Resolves when an observer like the player's own, but set up later, so asked later, has seen it come or go.
NOTICED = """wanted => new Promise(done => new IntersectionObserver(([stage], watcher) => {
    if (stage.isIntersecting === wanted) { watcher.disconnect(); done(); }
}, { rootMargin: "-30% 0px" }).observe(document.querySelector("#moving-long .moving-frames")))"""


def test_it_plays_once_by_itself_when_it_is_seen(browser: Browser, alone: str) -> None:
    with opened(browser, alone) as page:
        page.clock.run_for(60_000)
        assert shown(page, "long") == "A box at 1.", "out of sight it waits"
        come_to_it(page)
        expect(button(page, "Pause")).to_be_visible()
        assert shown(page, "long") == "A box at 1."
        page.clock.run_for(1_500)
        assert shown(page, "long") == "A box at 2."
        assert page.locator("#moving-long .moving-said").text_content() == "", "nothing is read out unasked"
        page.clock.run_for(60_000)
        assert shown(page, "long") == "A box at 4."
        expect(button(page, "Play")).to_be_visible()
        leave_it(page)
        come_to_it(page)
        assert shown(page, "long") == "A box at 4.", "once is once"


@pytest.mark.parametrize(("pressed", "number"), [("Pause", 2), ("Back", 1), ("Step", 3)])
def test_any_press_stops_what_plays_by_itself(pressed: str, number: int, browser: Browser, alone: str) -> None:
    with opened(browser, alone) as page:
        come_to_it(page)
        expect(button(page, "Pause")).to_be_visible()
        page.clock.run_for(1_500)
        button(page, pressed).dispatch_event("click")
        page.clock.run_for(60_000)
        assert shown(page, "long") == f"A box at {number}."


@pytest.mark.parametrize("act", ["button", "slider", "key"])
def test_what_a_reader_has_touched_does_not_start_by_itself(act: str, browser: Browser, alone: str) -> None:
    with opened(browser, alone) as page:
        if act == "button":
            button(page, "Step").dispatch_event("click")
        elif act == "slider":
            page.locator("#moving-long input").evaluate(
                "slider => { slider.value = 2; slider.dispatchEvent(new Event('input', { bubbles: true })); }"
            )
        else:
            page.locator("#moving-long .moving-frames").dispatch_event("keydown", {"key": "ArrowRight"})
        come_to_it(page)
        page.clock.run_for(60_000)
        assert shown(page, "long") == "A box at 2."


def test_where_motion_is_unwanted_it_stands_at_the_telling_frame_and_its_buttons_work(
    browser: Browser, alone: str
) -> None:
    with opened(browser, alone, reduced_motion="reduce") as page:
        come_to_it(page)
        page.clock.run_for(60_000)
        assert shown(page, "long") == "A box at 3."
        expect(page.locator("#moving-long input")).to_have_value("3")
        button(page, "Step").click()
        assert shown(page, "long") == "A box at 4."


def test_without_a_script_the_telling_frame_is_a_picture(browser: Browser, alone: str) -> None:
    context = chromium.context(browser, java_script_enabled=False)
    page = context.new_page()
    page.goto(alone)
    drawings = page.locator("#moving-long .moving-frames > div")
    assert [each.is_visible() for each in drawings.all()] == [False, False, True, False]
    context.close()


# --- One that is a file ---

SEEN = """() => [...document.querySelectorAll("g.frame")]
    .filter(frame => getComputedStyle(frame).visibility === "visible")
    .map(frame => frame.firstElementChild.getAttribute("aria-label"))"""


def test_a_film_shows_one_frame_after_the_other_and_begins_again(browser: Browser, tmp_path: Path) -> None:
    made = [frame(number, "word " * 10 * number) for number in (1, 2, 3, 4)]
    (tmp_path / "film.svg").write_text(player.film("film", made, "Four frames.", 2), "utf-8")
    stays = list(map(player.stay, made))
    context = chromium.context(browser)
    page = context.new_page()
    page.goto((tmp_path / "film.svg").as_uri())
    to = "at => document.getAnimations().forEach(turn => { turn.pause(); turn.currentTime = at; })"
    for number, start in enumerate(sum(stays[:count]) for count in range(4)):
        for moment in (start + 5, start + stays[number] - 5, start + 5 + sum(stays) + stays[-1]):
            page.evaluate(to, moment)
            assert page.evaluate(SEEN) == [f"A box at {number + 1}."], moment
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(SEEN) == ["A box at 3."]
    assert page.evaluate("document.getAnimations().length") == 0
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
    button(tab, "Step").click()
    assert (shown(tab, "long"), shown(tab, "later")) == ("A box at 3.", "A box at 2.")
