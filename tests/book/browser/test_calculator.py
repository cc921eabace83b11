"""The calculator of the envelope page in a real browser: the formulas of Python, and what it says to people."""

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

from tools.pages import envelope_parts
from tools.pages.envelope import LAYOUTS, PRESETS, Step, by_layout

QUANTITIES = (
    "pass_flops", "newton_schulz_flops", "adamw_bytes", "muon_dp_bytes", "muon_tp_bytes", "adamw_kept", "muon_kept",
    "pass_seconds", "newton_schulz_seconds", "adamw_seconds", "muon_seconds", "share",
)  # fmt: skip


def some_steps() -> list[Step]:
    """Return the presets in every layout, and steps that somebody might type."""
    draw, found = random.Random(0), [one for _, step in PRESETS.values() for one in by_layout(step).values()]
    for layout in LAYOUTS * 20:
        ep, experts, heads = draw.choice([1, 1, 2, 8]), draw.choice([1, 8, 64]), draw.choice([8, 32])
        sides = {name: 128 * draw.randint(1, 99) for name in ("width", "mlp", "vocabulary")}
        sides |= {"heads": heads, "kv_heads": draw.choice([heads, heads // 8]), "mlp_matrices": draw.choice([2, 3])}
        sizes = {"gradient": draw.choice([2, 4]), "parameter": draw.choice([2, 4])}
        grid = {"dp": ep * draw.randint(1, 40), "tp": draw.choice([1, 2, 8]), "pp": draw.randint(1, 6), "ep": ep}
        speeds: dict[str, Any] = {name: draw.uniform(0.5, 900) for name in ("tflops", "dp_link", "tp_link")}
        number = {"layers": draw.randint(1, 90), "experts": experts, "active": draw.randint(1, experts)}
        found.append(Step(**sides, **sizes, **grid, **speeds, **number, tokens=draw.randint(1, 1 << 26), layout=layout))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with the calculator alone, by its address on the disk."""
    path = tmp_path_factory.mktemp("envelope") / "page.html"
    (box,) = (line for line in envelope_parts.calculator().splitlines() if line.startswith("<div"))
    script = (ROOT / "book" / "_static" / "envelope.js").read_text(encoding="utf-8")
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
    found = tab.evaluate("steps => steps.map(envelopeStep)", [asdict(step) for step in steps])
    for step, numbers in zip(steps, found, strict=True):
        assert numbers.keys() == set(QUANTITIES)
        for name in QUANTITIES:
            assert numbers[name] == pytest.approx(getattr(step, name), rel=1e-12), (name, step)


def test_it_begins_with_a_model_and_goes_on_with_the_readers_own_numbers(tab: Page) -> None:
    table, tokens = tab.get_by_role("table"), tab.get_by_label("tokens in a step, all ranks")
    for place, (_, step) in enumerate(PRESETS.values()):
        tab.get_by_label("Start from").select_option(str(place))
        expect(tokens).to_have_value(str(step.tokens))
        shares = [envelope_parts.percent(one.share) for one in by_layout(step).values()]
        assert table.get_by_role("row").last.get_by_role("cell").all_inner_texts() == shares
    before = table.inner_text()
    tokens.fill("1048576")
    expect(tab.get_by_label("Start from")).to_have_value("-1")
    assert table.inner_text() != before
    names = table.get_by_role("row").first.get_by_role("columnheader").all_inner_texts()
    assert names[-len(LAYOUTS) :] == list(envelope_parts.TITLES.values())


REFUSED = (  # a field, what is typed into it, and what is said
    ("tokens in a step, all ranks", "", "tokens in a step, all ranks: give a whole number, 1 or more."),
    ("layers", "0", "layers: give a whole number, 1 or more."),
    ("data-parallel ranks D", "2.5", "data-parallel ranks D: give a whole number, 1 or more."),
    ("TFLOP/s that a rank reaches", "0", "TFLOP/s that a rank reaches: give more than 0."),
    ("experts that a token sees", "5", "A token cannot see 5 of 1 experts."),
    ("ranks that share the experts", "3", "3 ranks that share the experts do not divide the data-parallel ranks"),
    ("ranks that share the experts", "2", "2 ranks that share the experts do not divide the experts, which are 1."),
    ("tensor-parallel ranks T", "3", "3 tensor-parallel ranks do not divide the heads of keys and values"),
    ("heads of keys and values", "5", "5 heads of keys and values do not divide all heads, which are 32."),
    ("heads", "33", "33 heads do not divide a width of 2,048."),
    ("pipeline stages", "64", "22 layers are too few for 64 pipeline stages."),
    ("tokens in a step, all ranks", "7", "7 tokens are too few for 8 data-parallel ranks."),
    ("matrices in an MLP, 3 if gated", "4", "An MLP has 3 matrices if it is gated, and 2 if it is not."),
    ("data-parallel ranks D", "1e9", "We deal out at most 1,048,576 matrices, to as many ranks"),
    ("bytes of a weight", "3", "A weight or a gradient takes 4 bytes"),
)


def test_what_makes_no_sense_is_answered_in_a_sentence(tab: Page) -> None:
    for label, value, said in REFUSED:
        tab.get_by_label("Start from").select_option("0")
        expect(tab.get_by_role("table")).to_have_count(1)
        tab.get_by_label(label, exact=True).fill(value)
        expect(tab.get_by_role("status")).to_contain_text(said)
        expect(tab.get_by_role("table")).to_have_count(0)


def test_a_notebook_may_show_it_twice_long_after_it_was_loaded(tab: Page) -> None:
    tab.evaluate("document.body.replaceChildren()")
    for _ in range(2):  # the cell is run again
        tab.evaluate(
            "text => document.body.replaceChildren(document.createRange().createContextualFragment(text))",
            envelope_parts.calculator_in_a_notebook("70b"),
        )
    expect(tab.get_by_label("tokens in a step, all ranks")).to_have_value(str(PRESETS["70b"][1].tokens))
    shares = [envelope_parts.percent(one.share) for one in by_layout(PRESETS["70b"][1]).values()]
    assert tab.get_by_role("row").last.get_by_role("cell").all_inner_texts() == shares
