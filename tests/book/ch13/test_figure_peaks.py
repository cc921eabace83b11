"""Peaks beside AdamW's: bars on their side of its line, on one scale, with numbers; and how they follow from plans."""

from typing import Any

import pytest
from figure_helpers import assert_readable, boxes, texts
from matplotlib.patches import Polygon

from muonbook.ch13.figure_peaks import HALF, LINE, ZERO, describe_peaks, draw_peaks
from muonbook.ch13.memory_tables import PLANNED, PeakedWorld, peaked_world, weigh_updates
from muonbook.figures import style
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting

WORLDS = {
    "small": PeakedWorld(50e9, {"bucketed": -2e9, "flat": 12e9}),
    "large": PeakedWorld(70.4e9, {"bucketed": 1e9, "flat": -0.5e9, "owner": -9e9}),
}
SHOWN: Any = {"title": "One saves, one does not", "most": 4e9}


def reach(figure: Any, name: str) -> float:
    """Return where the bar of this name ends, in points beyond the line's edge; negative to the left."""
    (bar,) = boxes(figure, f"peak-{name}")
    left, right = bar.get_x(), bar.get_x() + bar.get_width()
    assert ZERO - LINE / 2 in (pytest.approx(right), pytest.approx(left - LINE))
    return right - ZERO - LINE / 2 if left > ZERO else left - ZERO + LINE / 2


def breaks(figure: Any) -> dict[str, Polygon]:
    """Return the gaps in bars that are cut off, {gid: patch}."""
    return {patch.get_gid(): patch for patch in figure.axes[0].patches if (patch.get_gid() or "").startswith("break-")}


# ---- Drawn ------------------------------------------------------------------------------------------------


def test_bars_lie_on_their_side_of_adamws_line_on_one_scale() -> None:
    figure = draw_peaks(WORLDS, **SHOWN)
    found = {name: reach(figure, name) / HALF for name in ("small-bucketed", "large-bucketed", "large-flat")}
    assert found == pytest.approx({"small-bucketed": -2 / 4, "large-bucketed": 1 / 4, "large-flat": -0.5 / 4})


def test_a_bar_beyond_the_limit_ends_there_in_a_break_and_no_other_does() -> None:
    figure = draw_peaks(WORLDS, **SHOWN)
    assert reach(figure, "small-flat") == pytest.approx(HALF)
    assert reach(figure, "large-owner") == pytest.approx(-HALF)
    gaps = breaks(figure)
    assert set(gaps) == {"break-small-flat", "break-large-owner"}
    for gid, gap in gaps.items():
        (bar,) = boxes(figure, gid.replace("break", "peak"))
        assert bar.get_x() < gap.get_xy()[:, 0].min() < gap.get_xy()[:, 0].max() < bar.get_x() + bar.get_width()
    whole = draw_peaks(WORLDS)
    assert not breaks(whole)
    assert reach(whole, "small-flat") == pytest.approx(HALF)
    assert reach(whole, "small-bucketed") == pytest.approx(-HALF / 6)


def test_numbers_carry_a_sign_and_every_panel_the_peak_that_they_are_from() -> None:
    figure, alt = draw_peaks(WORLDS, **SHOWN), describe_peaks(WORLDS, **SHOWN)
    style.require_readable(figure, alt)
    assert_readable(figure)
    signed = [text for text in texts(figure) if text[0] in "+−"]
    assert signed == ["−2.0 GB", "+12.0 GB", "+1.0 GB", "−0.5 GB", "−9.0 GB"]
    assert [text for text in texts(figure) if "peak" in text] == ["AdamW's peak, 50 GB", "AdamW's peak, 70.4 GB"]


def test_what_is_above_looks_different_from_what_is_below() -> None:
    figure = draw_peaks(WORLDS)
    colours = {box.get_gid(): box.get_facecolor() for box in boxes(figure, "peak-")}
    above = {colours.pop("peak-small-flat"), colours.pop("peak-large-bucketed")}
    assert len(above) == len(set(colours.values())) == 1
    assert above.isdisjoint(colours.values())


def test_the_alt_text_has_every_number_and_its_side() -> None:
    assert describe_peaks(WORLDS, **SHOWN) == (
        "One saves, one does not. small, from AdamW's peak, 50 GB: bucketed 2.0 GB below, flat 12.0 GB above. "
        "large, from AdamW's peak, 70.4 GB: bucketed 1.0 GB above, flat 0.5 GB below, owner 9.0 GB below."
    )


def test_without_a_bar_there_is_no_picture() -> None:
    for nothing in ({}, {"empty": PeakedWorld(1e9, {})}):
        with pytest.raises(ValueError, match="here is none"):
            draw_peaks(nothing)


# ---- Planned ----------------------------------------------------------------------------------------------


def test_peaks_are_those_that_the_planner_has() -> None:
    """Where the passes hide both updates; the planner counts AdamW's step counters, too."""
    model, degrees = MODELS["llama3_8b"], Degrees(8)
    adamw, muon = (
        WorldPlan(WorldSetting(model, degrees, optimizer, "gather_all", "megatron", recompute=True))
        for optimizer in ("adamw", "muon")
    )
    assert "while stepping" not in {**adamw.held_at_worst, **muon.held_at_worst}
    found = peaked_world(model, degrees)
    assert found.adamw == adamw.fullest[2]
    assert found.beyond["bucketed"] == pytest.approx(muon.fullest[2] - adamw.fullest[2], rel=1e-6)


@pytest.mark.parametrize(("model", "degrees"), [("llama3_8b", Degrees(8)), ("llama3_70b", Degrees(128, 8))])
def test_the_more_an_update_borrows_the_less_is_saved(model: str, degrees: Degrees) -> None:
    """In layouts of which every rank keeps as much; nobody's fullest rank saves more than ranks do on average."""
    saved, updates = weigh_updates(MODELS[model], degrees)
    beyond = peaked_world(MODELS[model], degrees).beyond
    assert list(beyond) == list(PLANNED)
    counters = 4 * len(MODELS[model].specs(degrees.tp)[0])  # AdamW's steps
    assert all(size >= -saved - counters for size in beyond.values())
    alike = sorted(("matrix by matrix", "bucketed"), key=updates.__getitem__)
    assert [beyond[name] for name in alike] == sorted(beyond[name] for name in alike)


def test_a_flat_shard_without_matrices_saves_nothing() -> None:
    """The embeddings and the head of the 8B fill one of eight shards."""
    model, degrees = MODELS["llama3_8b"], Degrees(8)
    beyond, saved = peaked_world(model, degrees).beyond, weigh_updates(model, degrees)[0]
    assert abs(beyond["flat + cut"]) < 0.001 * saved
    assert beyond["bucketed"] == pytest.approx(-saved, rel=1e-3)


def test_above_the_passes_peaks_differ_by_what_updates_borrow() -> None:
    where = MODELS["llama3_70b"], Degrees(128, 8)
    (_, updates), beyond = weigh_updates(*where), peaked_world(*where).beyond
    higher = beyond["bucketed"] - beyond["matrix by matrix"]
    assert higher == pytest.approx(updates["bucketed"] - updates["matrix by matrix"], rel=0.01)


@pytest.mark.parametrize(
    ("model", "degrees", "words"),
    [("llama3_8b", Degrees(4, pp=2), "not of PP 2, EP 1"), ("gpt2", Degrees(4), "GPT-2: AdamW's update may borrow")],
)
def test_where_the_passes_are_not_one_ranks_peak_there_is_no_answer(model: str, degrees: Degrees, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        peaked_world(MODELS[model], degrees)
