"""Figures tell the truth: every element drawn once in its owner's colour, every number computed."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import figure_helpers
import pytest
from figure_helpers import assert_readable, texts
from matplotlib import style as mpl_style
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from distmuon.sharding.layout import Layout, ParamSpec, plan
from distmuon.sharding.ownership import plan_owned
from muonbook.ch10 import figures as figure_run
from muonbook.figures import style, virtual_map


def specs(*sizes: int, dtype: str = "float32", prefix: str = "w") -> list[ParamSpec]:
    return [ParamSpec(f"{prefix}{n}", (size,), dtype) for n, size in enumerate(sizes)]


DEMO = [
    ParamSpec("fc1.weight", (128, 64), "float32", 0),
    ParamSpec("fc1.bias", (128,), "float32", 0),
    ParamSpec("fc2.weight", (128, 128), "float32", 1),
    ParamSpec("fc2.bias", (128,), "float32"),
    ParamSpec("fc3.weight", (128, 128), "float32"),
    ParamSpec("head.weight", (10, 128), "float32"),
    ParamSpec("head.bias", (10,), "float32"),
]
LAYOUTS = {
    "demo": (plan(DEMO, 4, 16384), 2),
    "one process": (plan(DEMO, 1, 16384), 1),
    "many DP ranks": (plan(DEMO, 20, 16384), 1),
    "two buffers": (plan([*specs(9, 70, 5, 1), *specs(33, 2, 40, dtype="bfloat16", prefix="b")], 4, 40), 3),
    "one element": (plan(specs(1), 8), 2),
    "200 parameters": (plan(specs(*(1 + n * 7 % 13 for n in range(200))), 4), 1),
    "one owner per matrix": (plan_owned(DEMO, {0: 3, 2: 6, 4: 6}, 4, 2, 16384), 2),
    "a parameter without elements": (plan([*specs(12), ParamSpec("none", (0, 3), "float32")], 3), 1),
}
every_layout = pytest.mark.parametrize(("layout", "tp"), LAYOUTS.values(), ids=LAYOUTS.keys())


def boxes(figure: Figure, start: str) -> dict[str, Rectangle]:
    return {str(box.get_gid()): box for box in figure_helpers.boxes(figure, start)}


def report(dp: int = 2, tp: int = 2, steps: int = 3, wrong: int = 0, **changes: Any) -> dict[str, Any]:
    """A worker's report: rank r sends 1000 + r bytes per step over DP and 500 over TP; `wrong` is one rank's error."""
    ledger = [
        {"rank": r, "op": op, "group": group, "calls": steps, "payload_bytes": 1, "sent_bytes": sent,
         "predicted_sent_bytes": sent + (wrong if r == 0 else 0)}
        for r in range(dp * tp)
        for op, group, sent in (("all_gather", "dp", (1000 + r) * steps), ("all_gather", "tp", 500 * steps))
    ]  # fmt: skip
    losses = [2.5 - 0.5 * step for step in range(steps)]
    return {
        "grid": {"dp": dp, "tp": tp}, "backend": "gloo", "dtype": "float32", "optimizer": "muon", "steps": steps,
        "losses": losses, "reference_losses": [loss + 1e-3 for loss in losses], "ledger": ledger, "exact": True,
        "float64_relative_difference": 3e-15, "relative_difference": 2e-2, "control_relative_difference": 1e-2,
        "unrounded_relative_difference": 2e-6, "unrounded_control_relative_difference": 1e-6, "replicas_agree": True,
    } | changes  # fmt: skip


# The map


@every_layout
def test_every_element_is_drawn_once_in_its_owners_colour(layout: Layout, tp: int) -> None:
    figure = virtual_map.draw_map(layout, tp)
    assert_readable(figure)
    drawn = boxes(figure, "shard-") | boxes(figure, "padding-")
    left = min(box.get_x() for box in drawn.values())
    right = max(box.get_x() + box.get_width() for box in drawn.values())
    longest = max(bucket.padded for bucket in layout.buckets)
    rows = min(tp, 8)
    assert len(drawn) == len(layout.buckets) * rows * layout.dp * 2
    for bucket in layout.buckets:
        stretched = bucket.padded < virtual_map.SLIVER * longest  # drawn as long as the longest
        scale = (right - left) / (bucket.padded if stretched else longest)
        for row in range(rows):
            ident = f"{bucket.buffer_idx}.{bucket.bucket_idx}"
            shards = [drawn[f"shard-{ident}-dp{r}-tp{row}"] for r in range(layout.dp)]
            padding = [drawn[f"padding-{ident}-dp{r}-tp{row}"] for r in range(layout.dp)]
            strip = [box for pair in zip(shards, padding, strict=True) for box in pair]
            assert strip[0].get_x() == pytest.approx(left)
            for before, after in pairwise(strip):  # neither gap nor overlap
                assert after.get_x() == pytest.approx(before.get_x() + before.get_width())
            assert sum(box.get_width() for box in strip) / scale == pytest.approx(bucket.padded)
            assert {to_hex(box.get_facecolor()) for box in padding} == {to_hex(style.PADDING)}
            for r, shard in enumerate(shards):
                owned = sum(layout.meta(bucket, i, r).local_range.size for i in bucket.params)
                assert shard.get_width() / scale == pytest.approx(owned, abs=1e-6)
                assert to_hex(shard.get_facecolor()) == to_hex(style.dp_colour(r))
                assert (shard.get_hatch() or "") == style.TP_HATCHES[row]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (plan([], 2), "no elements"),
        (plan([ParamSpec("none", (0,), "float32")], 2), "no elements"),
        (plan(specs(*[4] * 61), 2, bucket_size=1), "61 buckets"),
    ],
)
def test_a_map_that_cannot_be_drawn_says_why(layout: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        virtual_map.draw_map(layout)


# The run


def test_bars_are_means_over_ranks_and_steps() -> None:
    figure = figure_run.draw_run(report(), LAYOUTS["demo"][0], 2)
    assert {"all_gather over dp", "1 kB", "all_gather over tp", "500 B", "✓ 6 of 6 checks hold"} <= set(texts(figure))
    counted, predicted = (list(boxes(figure, kind).values()) for kind in ("counted", "predicted"))
    assert counted[1].get_width() / counted[0].get_width() == pytest.approx(500 / 1001.5)
    assert [box.get_width() for box in counted] == [box.get_width() for box in predicted]


def test_a_wrong_prediction_is_seen_and_said() -> None:
    figure = figure_run.draw_run(report(wrong=1200), LAYOUTS["demo"][0], 2)
    assert "1 kB counted, 1.1 kB predicted" in texts(figure)
    assert "✗ 5 of 6 checks hold" in texts(figure)
    assert boxes(figure, "counted-0")["counted-0"].get_width() < boxes(figure, "predicted-0")["predicted-0"].get_width()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"exact": False}, "✗ exact: same gradients in, not bitwise equal out"),
        ({"float64_relative_difference": 2e-10}, "✗ float64: 2.0e-10 apart, 1e-10 allowed"),
        ({"float64_relative_difference": float("nan")}, "✗ float64: nan apart, 1e-10 allowed"),
        ({"replicas_agree": False}, "✗ replicas: ranks differ in their whole parameters"),
        ({"unrounded_relative_difference": 5e-6}, "✗ unrounded: 5.0e-06 apart, 4.0e-06 allowed"),
        ({"relative_difference": 5e-2}, "✗ float32: 5.0e-02 apart, 4.0e-02 allowed"),
    ],
)
def test_each_check_can_fail(changes: dict[str, Any], line: str) -> None:
    assert line in texts(figure_run.draw_run(report(**changes), LAYOUTS["demo"][0], 2))
    assert "5 of 6 checks hold" in figure_run.describe_run(report(**changes))


def test_a_check_without_power_is_shown_and_not_counted() -> None:
    coarse = report(relative_difference=0.4, control_relative_difference=0.1)
    assert "– float32: 4.0e-01 apart, no power here" in texts(figure_run.draw_run(coarse, LAYOUTS["demo"][0], 2))
    assert "; 5 of 5 checks hold" in figure_run.describe_run(coarse)


def test_checks_not_made_are_left_out() -> None:
    kinds = [f"{kind}relative_difference" for kind in ("float64_", "unrounded_", "")]
    changes: dict[str, Any] = dict.fromkeys(["exact", *kinds, "replicas_agree"])
    assert "; 1 of 1 checks hold" in figure_run.describe_run(report(**changes))


def test_one_process_sends_nothing() -> None:
    result = report(1, 1) | {"ledger": []}
    assert "none: there is nobody to send to" in texts(figure_run.draw_run(result, LAYOUTS["one process"][0], 1))


# Files and alt text


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_same_figure_gives_the_same_bytes_whatever_the_readers_style(tmp_path: Path, suffix: str) -> None:
    def written(name: str) -> bytes:
        figure = virtual_map.draw_map(*LAYOUTS["one process"])
        return style.save(figure, tmp_path / f"{name}{suffix}", "what it shows").read_bytes()

    first = written("first")
    with mpl_style.context("dark_background"):
        assert written("second") == first


def test_alt_text_travels_in_the_file(tmp_path: Path) -> None:
    figure, alt = virtual_map.draw_map(*LAYOUTS["one element"]), "one < two × three"
    with Image.open(style.save(figure, tmp_path / "map.png", alt)) as image:
        assert image.info["Description"] == alt
        assert image.width == 1080
        opacity = image.convert("RGBA").getchannel("A")
        assert (opacity.getpixel((0, 0)), opacity.getpixel((480, 10))) == (0, 255)  # a card with round corners
    title = "<title>one &lt; two × three</title>"
    assert title in style.save(figure, str(tmp_path / "map.svg"), alt).read_text(encoding="utf-8")


def test_save_refuses_silence_and_unknown_formats(tmp_path: Path) -> None:
    figure = virtual_map.draw_map(*LAYOUTS["one element"])
    with pytest.raises(ValueError, match="alt text"):
        style.save(figure, tmp_path / "map.png", "  ")
    with pytest.raises(ValueError, match=r"'\.jpg'"):
        style.save(figure, tmp_path / "map.jpg", "a map")
    assert not list(tmp_path.iterdir())


def test_alt_text_has_the_true_numbers() -> None:
    assert virtual_map.describe_map(*LAYOUTS["demo"]) == (
        "Virtual map of 7 parameters, 42,506 elements + 2 padding per TP rank, 3 buckets, each of 4 equal shards, one "
        "per DP rank. On more than one DP rank: fc1.weight, fc2.weight, fc3.weight and 1 more."
    )
    assert virtual_map.describe_map(*LAYOUTS["one process"]).endswith(
        "each of one shard. On more than one DP rank: no parameter."
    )
    assert figure_run.describe_run(report()) == (
        "2 DP × 2 TP, muon, float32, gloo: loss from 2.5 to 1.5 in 3 steps; 6 of 6 checks hold. "
        "Each rank sends 1.5 kB per step, predicted 1.5 kB."
    )


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999.4, "999 B"), (999.6, "1 kB"), (42_496, "42.5 kB"), (3e15, "3e+03 TB")]
)
def test_bytes_are_decimal(number: float, text: str) -> None:
    assert style.in_bytes(number) == text


def test_module_needs_neither_torch_nor_pyplot() -> None:
    code = "import sys; import muonbook.ch10.figures; print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    scripts = Path(style.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=scripts, capture_output=True, text=True).stdout == "set()\n"
