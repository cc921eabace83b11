"""The page on planning: its commands are taken, its listings are theirs, and its sentences follow from both."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
import worlds

from muonbook.ch18 import divisions
from muonbook.figures import player
from muonbook.measure import results
from muonbook.planner.model_shapes import MODELS, find_shape
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting
from tools.pages import plans, published
from tools.pages.plans import PARTS, by_part, frames_of_sizes

PAGE = (worlds.ROOT / "book" / "planner.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())


def listing(name: str) -> str:
    return (worlds.ROOT / "book" / "figures" / name).read_text(encoding="utf-8")


# ---- Commands and options; test_pages.py runs the commands and compares the listings -----------------------------


def test_every_command_on_the_page_is_followed_by_what_it_prints() -> None:
    commands = re.findall(r"^python scripts/plan\.py .*$", PAGE, re.MULTILINE)
    assert [command for command, _ in plans.COMMAND.findall(PAGE)] == commands
    assert len(commands) == 3


def test_the_table_has_every_option_and_its_default() -> None:
    told = subprocess.run(
        [sys.executable, "scripts/plan.py", "--help"], cwd=worlds.ROOT, check=True, capture_output=True, text=True
    ).stdout
    table = PAGE[PAGE.index("## All options") :]
    assert set(re.findall(r"--[a-z][a-z-]+", table)) == set(re.findall(r"^  (--[a-z-]+)", told, re.MULTILINE))
    for option, default in re.findall(r"^  (--[a-z-]+)[^-]*?\(default:\s+(\w+)\)", told, re.MULTILINE):
        (row,) = (line for line in table.splitlines() if line.startswith("|") and option in line.split("|")[1])
        assert default in row.replace("`", ""), option


def test_the_models_that_are_built_in_are_named() -> None:
    (named,) = re.findall(r"instead of a file: (.*?)\.\n", PAGE)
    assert re.findall(r"`(\w+)`", named) == list(MODELS)


# ---- What the page says of its listings ---------------------------------------------------------------------------


def test_what_the_page_says_of_the_first_plan() -> None:
    shares = dict(re.findall(r"^  ([\w–, ()]+?) +[\d.]+ +([\d.]+)%$", listing("planner_one.txt"), re.MULTILINE))
    assert 85 < float(shares["forward, backward"]) < 90
    assert float(shares["activations (tp)"]) > 0.5 * (100 - float(shares["forward, backward"]))
    assert float(shares["Newton–Schulz"]) < 1


def test_what_the_page_says_of_divisions() -> None:
    told = listing("planner_divisions.txt")
    assert "28 divisions are possible, 4 have room" in told
    assert re.findall(r"^ +\d+ +(\d+) +\d+ +\d+ +[\d.]+ GB", told, re.MULTILINE) == ["8"] * 4


def test_what_the_page_and_chapter_17_say_of_layouts() -> None:
    rows = re.findall(
        r"^    (\w[\w ,]+?) +([\d.]+) +([\d.]+)x .* ([\d.]+) ranks? +([\d.]+) GB$", listing("planner_layouts.txt"), re.M
    )
    layouts = {name: (float(ratio), float(seconds), *map(float, others)) for name, seconds, ratio, *others in rows}
    assert len(layouts) == 5
    assert (round(layouts["gather all, bucketed"][0], 1), round(layouts["gather all, bucketed"][2])) == (1.3, 44)
    assert {layouts[name][0] for name in layouts if name != "gather all, bucketed"} == {1.01, 1.02}
    assert layouts["MuonW"][0] == 1.01  # as chapter 17 says
    assert layouts["MuonW"][1] == max(seconds for _, seconds, *_ in layouts.values())
    assert layouts["MuonW"][3] == min(held for *_, held in layouts.values())


# ---- More and more GPUs --------------------------------------------------------------------------------------------


def test_a_picture_of_plans_shows_every_second_and_byte() -> None:
    sizes = [size for size in results.load("divisions")["sizes"] if size["degrees"]]
    frames = frames_of_sizes(results.load("divisions")["sizes"])
    assert len(frames) == len(sizes) <= len(divisions.SIZES)
    assert "<svg" in player.html("plans", frames)
    for size, frame in zip(sizes, frames, strict=True):
        parts = by_part(size["seconds"])
        assert list(parts) == list(PARTS)
        assert math.isclose(sum(parts.values()), size["step_seconds"], rel_tol=2e-3)
        assert sum(size["held"].values()) <= size["room"]
        assert size["degrees"] in frame.alt


def test_a_part_of_a_step_that_no_colour_stands_for_is_an_error() -> None:
    with pytest.raises(StopIteration):
        by_part({"something new": 1.0})


def test_stored_plans_on_the_slider_are_those_of_todays_planner() -> None:
    """Three divisions planned anew; one is the quickest of all that the puzzle's table has for as many ranks."""
    stored = [size for size in results.load("divisions")["sizes"] if size["degrees"]]
    for size in stored[::2]:
        degrees = Degrees(*map(int, re.findall(r"\d+", size["degrees"])))
        plan = WorldPlan(WorldSetting(find_shape(divisions.MODEL), degrees))
        assert size["held"] == {kind: round(amount) for kind, amount in plan.held_at_worst.items()}
        assert size["seconds"] == {name: float(f"{took:.4g}") for name, took in plan.seconds.items()}
        assert size["step_seconds"] == float(f"{plan.step_seconds:.4g}")
    (kimi,) = (world for world in results.load("divisions")["worlds"] if world["ranks"] == 1024)
    fitting = [row for row in kimi["divisions"] if row["bytes"] <= kimi["room"]]
    quickest = min(fitting, key=lambda row: row["seconds"])["degrees"]
    assert str(Degrees(*quickest)) in [size["degrees"] for size in stored if size["ranks"] == 1024]


def test_what_the_page_says_of_larger_and_larger_worlds_is_stored() -> None:
    sizes = {size["ranks"]: size for size in results.load("divisions")["sizes"]}
    assert round((sizes[256]["room"] - sum(sizes[256]["held"].values())) / 1e9, 2) == 0.26
    assert round(sizes[1024]["step_seconds"] / sizes[8192]["step_seconds"]) == 5
    shares = [size["seconds"]["Newton–Schulz"] / size["step_seconds"] for size in sizes.values() if size["degrees"]]
    assert 0.008 < min(shares) <= max(shares) < 0.07
    held = [sizes[ranks]["held"]["parameters"] for ranks in (1024, 2048)]
    assert round(held[1] / held[0], 1) == 2.0
    assert "32 PP" in sizes[1024]["degrees"]
    assert "16 PP" in sizes[2048]["degrees"]
    assert sizes[256]["seconds"]["tokens (ep)"] == max(
        took for name, took in sizes[256]["seconds"].items() if name != "forward, backward"
    )
    assert by_part(sizes[256]["seconds"])["activations, tokens"] > sizes[256]["step_seconds"] / 2
    assert [f"{sizes[ranks]['seconds']['bubble']:.2f}" for ranks in (1024, 2048)] == ["0.91", "0.40"]


# ---- How far off it was --------------------------------------------------------------------------------------------


def test_the_planner_is_within_a_quarter_of_five_published_figures() -> None:
    errors = {f"{figure.what}, {figure.world}": figure.error for figure in published.FIGURES}
    near = [name for name, error in errors.items() if abs(error) <= 0.25]
    assert len(near) >= 5, errors
    off = [figure.world for figure in published.FIGURES if abs(figure.error) > 0.25]
    assert [world.split(",")[0] for world in off] == ["Qwen3 30B-A3B", "Kimi K2's sizes", "Qwen3 30B-A3B"]
    owner = next(figure for figure in published.FIGURES if "one owner" in figure.what)
    added = [1000 * published.DMUON_ADAMW * (ratio - 1) for ratio in (owner.published, owner.planned())]
    assert "Muon adds {:.0f} ms published and {:.0f} ms planned".format(*added) in owner.world
    counted = [figure for figure in published.FIGURES if "operations" in figure.what]
    assert all(3 < figure.published / figure.planned() < 4 for figure in counted)  # as the page says
    asked = [round(100 * figure.error) for figure in published.FIGURES if figure.what.startswith("what Muon adds")]
    assert asked == [-24, -71]
    assert "Muon adds {:.0f} milliseconds by their figures and {:.0f} by our plan".format(*added) in PROSE
    timed = [figure.error for figure in published.FIGURES if figure.what.startswith("Newton–Schulz of")]
    assert max(map(abs, timed)) <= 0.175
