"""Chapter 2's worker as its readers run it: the products that it counts, the ratios that it prints."""

import re
import statistics

import pytest
import stored_pages
import torch
import worlds

from distmuon.optim.coefficients import quintics
from distmuon.optim.newton_schulz import flops
from muonbook.ch04 import sweep, tables
from muonbook.measure import results

WORKER = str(worlds.ROOT / "scripts" / "02_newton_schulz.py")


@pytest.mark.parametrize(("shape", "tall"), [((24, 40), False), ((40, 24), True)])
def test_fifteen_products_are_counted_and_their_operations_are_those_of_the_formula(
    shape: tuple[int, int], tall: bool
) -> None:
    ending = worlds.perform(WORKER, "--shape", f"{shape[0]}x{shape[1]}")
    assert (ending.code, ending.err) == (0, "")
    a, b = sorted(shape)
    counted = re.search(r"^all 15 products +([\d,]+)$", ending.out, re.MULTILINE)
    assert counted is not None
    assert int(counted[1].replace(",", "")) == flops(shape)
    rows = re.findall(r"^  \[(\d+), (\d+)\] @ \[(\d+), (\d+)\] ", ending.out, re.MULTILINE)
    assert [tuple(map(int, row)) for row in rows] == [(a, b, b, a), (a, a, a, a), (a, a, a, b)]
    assert ("had it not been transposed" in ending.out) == tall


def test_untransposed_takes_what_the_formula_says_with_the_sides_exchanged() -> None:
    out = worlds.perform(WORKER, "--shape", "30x10").out
    expected = 5 * (4 * 30 * 30 * 10 + 2 * 30**3)
    assert re.search(rf"transposed +{expected:,}   \({expected / flops((30, 10)):.2f} times", out)


def test_a_ratio_is_printed_and_no_times() -> None:
    ending = worlds.perform(WORKER, "--svd")
    assert (ending.code, ending.err) == (0, "")
    assert re.search(r"^a 512 x 512 matrix: an SVD takes \d+\.\d times as long", ending.out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "256"], "write rows x columns"),
        (["--shape", "0x8"], "each from 1 to 4096"),
        (["--svd", "--device", "tpu"], "--device tpu is unknown"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err


def test_the_band_begins_for_the_starts_that_the_page_names() -> None:
    ends = torch.tensor([0.0014, 0.0015], dtype=torch.float64)
    for a, b, c in quintics("muon", 5):
        ends = a * ends + b * ends**3 + c * ends**5
    below, lowest = (f"{end:.2f}" for end in ends.tolist())
    assert float(below) < float(lowest)
    page = stored_pages.prose("02_newton_schulz")
    assert "singular values of at least 0.0015 of the Frobenius norm" in page
    assert f"the values end in a band from {lowest} to 1.20" in page


def test_missing_1_did_not_hurt_in_the_race_that_the_page_names() -> None:
    race = results.load("race_variants")
    gaps = {name: tables.gaps(race, name) for name in ("muon", "deepseek_v4", "polar_express")}
    muon, ten, polar = (f"{statistics.median(values):.3f}" for values in gaps.values())
    assert muon == ten
    page = stored_pages.prose("02_newton_schulz")
    assert f"both end {muon} nats per letter above the lowest loss" in page
    assert f"In the same race it ended at {polar}, and we could not tell the two apart" in page
    assert not any(sweep.verdict(gaps[name], gaps["muon"]).claimed for name in ("deepseek_v4", "polar_express"))
    values = torch.linspace(0.003, 1, 1000, dtype=torch.float64)
    for step, (a, b, c) in enumerate(quintics("deepseek_v4", 10)):
        if step == 8:
            assert values.max() > 1.1
        values = a * values + b * values**3 + c * values**5
    assert (values - 1).abs().max() < 0.001
