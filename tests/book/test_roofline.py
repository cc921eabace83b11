"""The roofline page: its blocks of code, its tables and its sentences follow from the three speeds."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
import stored_pages

from distmuon.optim.newton_schulz import flops
from muonbook.measure import results
from muonbook.planner.fabrics import ADAPTER, DEVICES, INFINIBAND, PEAK_FLOPS
from tools.pages import accounting, envelope_parts, roofline_picture
from tools.pages.envelope import PRESETS

PAGE = (stored_pages.ROOT / "book" / "roofline.md").read_text(encoding="utf-8")
RATIO = PEAK_FLOPS / 3.35e12  # operations in the time of a byte, on an H100


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return stored_pages.run_blocks("roofline.md")


def test_three_pieces_of_work_are_limited_as_the_table_says(names: dict[str, Any]) -> None:
    lines = re.findall(r"^\| (?:multiply|update the weights|send the gradient).*$", PAGE, re.MULTILINE)
    kinds = ("computing", "memory", "sending")
    for piece, line in zip(("product", "update", "gradient"), lines, strict=True):
        *cells, limit = (cell.strip() for cell in line.split("|")[2:-1])
        micros = [1e6 * seconds for seconds in names[piece]]
        assert limit == kinds[micros.index(max(micros))]
        said = [float(cell.removesuffix(" µs").replace(",", "") or 0) for cell in cells]
        assert said == [round(each, 1 if each < 1 else None) for each in micros]
    (product, reads, _), (update, moves, _) = names["product"], names["update"]
    assert f"you get {product / update:.0f} times as many operations" in PAGE
    assert f"The update has {RATIO * update / moves:.2f} operations for every byte" in PAGE
    assert f"and the product has {RATIO * product / reads:,.0f}" in PAGE
    assert f"because {1e6 * update * PEAK_FLOPS / 67e12:.0f} µs are still nothing" in PAGE


def test_a_whole_model_is_counted_as_its_comments_say(names: dict[str, Any]) -> None:
    _, seven = PRESETS["7b"]
    said = re.findall(r"^(\w+) = .*  # ([\d.]+(?:e\d+)?)( billion)?", PAGE, re.MULTILINE)
    for name, value, billion in said:  # to the last digit that is said
        unit, last = 1e9 if billion else 1.0, 10.0 ** int(Decimal(value).as_tuple().exponent)
        assert names[name] / unit == pytest.approx(float(value), abs=last / 2), name
    assert {"parameters", "operations", "seconds", "one_gpu", "each_of_eight"} <= {name for name, *_ in said}
    assert names["operations"] == seven.pass_flops
    assert names["parameters"] == sum(m.elements for m in seven.parts[0].matrices) + seven.parts[0].tables
    assert f"{80 - names['each_of_eight'] / 1e9:.0f} GB left" in PAGE
    activations = accounting.rows()["one GPU"]["activations"]
    assert f"leaves {activations / 1e9:.0f} GB of them" in PAGE


def test_a_product_of_three_sizes_and_another_machine(names: dict[str, Any]) -> None:
    assert f"989 / 3.35 = {RATIO:.0f} operations" in PAGE
    assert f"on an H100 1/{RATIO:.0f}." in PAGE
    assert f"$a$ and $b$ are below {round(2 * RATIO)}," in PAGE
    device, memory = DEVICES["a100"].peak_flops / 1e12, 2.0
    assert f"{device:.0f} / {memory:.1f} = {device / memory:.0f} operations" in PAGE
    assert f"$t \\ge {1 / (1 / (device / memory) - 2 / 4096):.0f}$" in PAGE
    assert round(0.4 * device * 1e12 / 25e9, -3) == 5000


def test_tokens_that_hide_gradients() -> None:
    for link, rings in ((INFINIBAND, "one ring"), (ADAPTER, "eight rings")):
        assert f"it takes {envelope_parts.REACHED / link.bytes_per_second:,.0f} tokens per rank" in PAGE, rings
    lanes = envelope_parts.REACHED / (envelope_parts.LINKS["PCIe 4, 4 lanes"] * 1e9)
    assert f"about {round(lanes, -3):,.0f}" in PAGE
    assert f"{envelope_parts.REACHED / (envelope_parts.LINKS['NVLink of an H100'] * 1e9):.0f} suffice" in PAGE


def test_a_dot_of_the_roofline_is_a_measured_row_over_the_bytes_of_its_products() -> None:
    rows = {row["shape"]: row for row in results.load("gpu")["speed"]["rows"]}
    (single, batch, *_), names = roofline_picture.points(), list(roofline_picture.SHOWN)
    assert single.intensity == batch.intensity == flops((1024, 4096)) / (5 * 2 * (3 * 1024 * 4096 + 4 * 1024**2))
    assert [point.share for point in roofline_picture.points()] == [rows[name]["share_of_peak"] for name in names]
    assert single.intensity > roofline_picture.peak() / roofline_picture.MEMORY  # right of the corner
    _, alt = roofline_picture.draw()
    assert f"{single.tflops:.0f} ({100 * single.share:.0f} %)" in alt
