"""The calculator of the roofline page in a real browser: the formulas of Python, and what it says to people."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import chromium
import pytest
from built_book import ROOT
from chromium import DESK
from playwright.sync_api import Browser, Page, expect

from tools.pages import roofline_parts
from tools.pages.roofline import LAYOUTS, PRESETS, Step, by_layout

QUANTITIES = (
    "pass_flops", "newton_schulz_flops", "adamw_bytes", "muon_dp_bytes", "muon_tp_bytes", "adamw_kept", "muon_kept",
    "pass_seconds", "newton_schulz_seconds", "adamw_seconds", "muon_seconds", "share",
)  # fmt: skip


def some_steps() -> list[Step]:
    """Return the presets in every layout, and steps that somebody might type."""
    draw, found = random.Random(0), [one for _, step in PRESETS.values() for one in by_layout(step).values()]
    for layout in LAYOUTS * 20:
        ep, experts = draw.choice([1, 1, 2, 8]), draw.choice([1, 8, 64])
        sides = {name: 128 * draw.randint(1, 99) for name in ("width", "mlp", "vocabulary")}
        grid = {"dp": ep * draw.randint(1, 40), "tp": draw.choice([1, 2, 8]), "pp": draw.randint(1, 6), "ep": ep}
        speeds: dict[str, Any] = {name: draw.uniform(0.5, 900) for name in ("tflops", "dp_link", "tp_link")}
        number = {"layers": draw.randint(1, 90), "experts": experts, "active": draw.randint(1, experts)}
        found.append(Step(**sides, **grid, **speeds, **number, tokens=draw.randint(1, 1 << 26), layout=layout))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with the calculator alone, by its address on the disk."""
    path = tmp_path_factory.mktemp("roofline") / "page.html"
    (box,) = (line for line in roofline_parts.calculator().splitlines() if line.startswith("<div"))
    script = (ROOT / "book" / "_static" / "roofline.js").read_text(encoding="utf-8")
    path.write_text(f'<!doctype html><meta charset="utf-8"><body>{box}<script>{script}</script>', "utf-8")
    return Path(path).as_uri()


@pytest.fixture
def tab(browser: Browser, place: str) -> Iterator[Page]:
    """The page on a desk, without a network; a fault of the script fails the test."""
    context = chromium.context(browser, viewport=DESK, offline=True)
    page, trouble = context.new_page(), []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.goto(place)
    yield page
    assert trouble == []
    context.close()


def test_the_script_has_the_formulas_of_python(tab: Page) -> None:
    steps = some_steps()
    found = tab.evaluate("steps => steps.map(rooflineStep)", [asdict(step) for step in steps])
    for step, numbers in zip(steps, found, strict=True):
        assert numbers.keys() == set(QUANTITIES)
        for name in QUANTITIES:
            assert numbers[name] == pytest.approx(getattr(step, name), rel=1e-12), (name, step)


def test_it_begins_with_a_model_and_goes_on_with_the_readers_own_numbers(tab: Page) -> None:
    table, tokens = tab.get_by_role("table"), tab.get_by_label("tokens in a step, all ranks")
    for place, (_, step) in enumerate(PRESETS.values()):
        tab.get_by_label("Start from").select_option(str(place))
        expect(tokens).to_have_value(str(step.tokens))
        shares = [f"{float(f'{100 * one.share:.2g}'):g}" for one in by_layout(step).values()]
        said = table.get_by_role("row").last.get_by_role("cell").all_inner_texts()
        assert [f"{float(text.split()[0]):g}" for text in said] == shares
    before = table.inner_text()
    tokens.fill("1048576")
    expect(tab.get_by_label("Start from")).to_have_value("-1")
    assert table.inner_text() != before
    names = table.get_by_role("row").first.get_by_role("columnheader").all_inner_texts()
    assert names[-len(LAYOUTS) :] == list(roofline_parts.TITLES.values())


@pytest.mark.parametrize(
    ("label", "value", "said"),
    [
        ("tokens in a step, all ranks", "", "give 1 or more"),
        ("layers", "0", "layers is 0; give 1 or more."),
        ("TFLOP/s that a rank reaches", "0", "more than 0"),
        ("experts that a token sees", "5", "5 of 1 experts"),
        ("ranks that share the experts", "3", "3 ranks that share experts do not divide 8"),
    ],
)
def test_what_makes_no_sense_is_answered_in_a_sentence(tab: Page, label: str, value: str, said: str) -> None:
    tab.get_by_label(label).fill(value)
    expect(tab.get_by_role("status")).to_contain_text(said)
    expect(tab.get_by_role("table")).to_have_count(0)
