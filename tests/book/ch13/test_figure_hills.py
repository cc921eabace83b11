"""Hills and towers: on one scale, on their grounds, the number at Muon's peak; and those of two published models."""

from typing import Any

import pytest
from figure_helpers import assert_readable, texts
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from muonbook.ch13.figure_hills import describe_hills, draw_hills, frames_of_hills
from muonbook.ch13.memory_tables import (
    PLANNED,
    HillAndTower,
    PeakOfRank,
    hills_and_towers,
    hills_of_batches,
    peaked_world,
    weigh_updates,
)
from muonbook.figures import style
from muonbook.measure import results
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.stages import Degrees

GB = 1e9
LLAMAS = {"8B": (MODELS["llama3_8b"], Degrees(8)), "70B": (MODELS["llama3_70b"], Degrees(128, 8))}


def step(ground: float, hill: float, tower: float) -> HillAndTower:
    return HillAndTower(PeakOfRank(ground * GB, hill * GB), PeakOfRank(ground * GB, tower * GB))


WORLDS = {
    "high": {"AdamW": step(60, 8, 1), "owner": step(56, 8, 2), "flat": step(56, 8, 14)},
    "low": {"AdamW": step(50, 3, 1), "owner": step(49, 3, 3.7), "flat": step(49, 3, 4)},
}
SHOWN: Any = {"layout": "owner", "title": "High or not", "note": "Torn."}


def extent(figure: Figure, gid: str) -> Bbox:
    """Return where a silhouette is on the card, in points, y downwards."""
    (patch,) = (patch for patch in figure.axes[0].patches if patch.get_gid() == gid)
    return patch.get_path().transformed(patch.get_patch_transform()).get_extents()


def level(figure: Figure, world: str) -> float:
    """Return the height of the dashes at AdamW's peak, in points from the card's top."""
    (dashes,) = (line for line in figure.findobj(LineCollection) if line.get_gid() == f"level-{world}")
    return float(dashes.get_segments()[0][0][1])


def numbers(figure: Figure) -> list[Text]:
    return [text for text in figure.axes[0].texts if text.get_text()[0] in "+−0"]


# ---- Drawn ------------------------------------------------------------------------------------------------


def test_all_worlds_have_one_scale_and_everything_stands_on_its_ground() -> None:
    figure = draw_hills(WORLDS, **SHOWN)
    gigabyte = extent(figure, "hill-high-AdamW").height / 8
    for world, peaks in WORLDS.items():
        muon, adamw = peaks["owner"], peaks["AdamW"]
        grounds = {who: extent(figure, f"ground-{world}-{who}") for who in ("AdamW", "Muon")}
        saved = adamw.hill.ground - muon.hill.ground
        assert grounds["Muon"].y0 - grounds["AdamW"].y0 == pytest.approx(saved / GB * gigabyte)
        assert grounds["Muon"].y1 == pytest.approx(grounds["AdamW"].y1)
        shapes = {f"hill-{world}-{who}": (who, peaks["AdamW"].hill) for who in grounds}
        shapes[f"tower-{world}"] = "Muon", muon.tower
        for gid, (who, peak) in shapes.items():
            shape = extent(figure, gid)
            assert shape.height == pytest.approx(peak.height / GB * gigabyte)
            assert shape.y1 == pytest.approx(grounds[who].y0)
            assert grounds[who].x0 < shape.x0 < shape.x1 < grounds[who].x1
        assert level(figure, world) == pytest.approx(extent(figure, f"hill-{world}-AdamW").y0)
        assert extent(figure, f"hill-{world}-Muon").x1 < extent(figure, f"tower-{world}").x0


def test_where_the_rank_of_the_tower_keeps_less_the_tower_stands_lower() -> None:
    muon = HillAndTower(PeakOfRank(56 * GB, 8 * GB), PeakOfRank(54 * GB, 2 * GB))
    figure = draw_hills({"high": WORLDS["high"] | {"owner": muon}}, **SHOWN)
    gigabyte = extent(figure, "hill-high-Muon").height / 8
    assert extent(figure, "tower-high").y1 - extent(figure, "hill-high-Muon").y1 == pytest.approx(2 * gigabyte)


@pytest.mark.parametrize(("layout", "signed"), [("owner", ["−4.0 GB", "−0.3 GB"]), ("flat", ["+2.0 GB", "0.0 GB"])])
def test_the_number_stands_at_muons_peak_and_never_across_the_dashes(layout: str, signed: list[str]) -> None:
    figure = draw_hills(WORLDS, **SHOWN | {"layout": layout})
    assert [number.get_text() for number in numbers(figure)] == signed
    for number, (world, peaks) in zip(numbers(figure), WORLDS.items(), strict=True):
        muon, (x, head) = peaks[layout], number.get_position()
        peak = extent(figure, f"hill-{world}-Muon" if muon.highest is muon.hill else f"tower-{world}")
        assert peak.x0 < x < peak.x1
        foot, dashes = head + float(number.get_fontsize()), level(figure, world)
        if number.get_text() == "−4.0 GB":  # there is room between
            assert dashes < head < foot < peak.y0
        else:
            assert foot < min(dashes, peak.y0)
    above = {number.get_color() for number in numbers(figure) if number.get_text()[0] == "+"}
    assert above.isdisjoint(number.get_color() for number in numbers(figure) if number.get_text()[0] != "+")


def test_every_silhouette_has_its_size_and_the_dashes_theirs() -> None:
    figure = draw_hills(WORLDS, **SHOWN)
    sizes = [text for text in texts(figure) if text.endswith("0 GB") and text[0] in "2378"]
    assert sizes == ["8.00 GB", "8.00 GB", "2.00 GB", "3.00 GB", "3.00 GB", "3.70 GB"]
    assert [text for text in texts(figure) if "ground" in text and "less" not in text] == [
        "ground: 60 GB",
        "ground: 50 GB",
    ]
    assert [text for text in texts(figure) if "less" in text] == ["ground: 4.00 GB less", "ground: 1.00 GB less"]
    assert [text for text in texts(figure) if "peak" in text] == ["AdamW's peak, 68 GB", "AdamW's peak, 53 GB"]
    assert texts(figure).count("Muon, owner") == 2


def test_the_alt_text_has_every_number_and_its_side() -> None:
    assert describe_hills(WORLDS, **SHOWN) == (
        "High or not. high: AdamW keeps 60 GB, and its hill of 8.00 GB makes a peak of 68 GB. Muon, owner, keeps 4.00 "
        "GB less; on that stand a hill of 8.00 GB and a tower of 2.00 GB, the higher of them 4.0 GB below AdamW's "
        "peak. low: AdamW keeps 50 GB, and its hill of 3.00 GB makes a peak of 53 GB. Muon, owner, keeps 1.00 GB less; "
        "on that stand a hill of 3.00 GB and a tower of 3.70 GB, the higher of them 0.3 GB below AdamW's peak."
    )
    flat = describe_hills(WORLDS, "flat")
    assert "the higher of them 2.0 GB above AdamW's peak" in flat
    assert "the higher of them as high as AdamW's peak" in flat


def test_without_a_world_there_is_no_picture() -> None:
    with pytest.raises(ValueError, match="here is none"):
        draw_hills({}, **SHOWN)


# ---- Planned ----------------------------------------------------------------------------------------------


def test_the_published_models_are_readable_and_one_saves_more_than_the_other() -> None:
    found = {name: hills_and_towers(*where) for name, where in LLAMAS.items()}
    shown = SHOWN | {"layout": "matrix by matrix"}
    figure, alt = draw_hills(found, **shown), describe_hills(found, **shown)
    style.require_readable(figure, alt)
    assert_readable(figure)
    assert [number.get_text() for number in numbers(figure) if number.get_text()[0] == "−"] == ["−3.5 GB", "−0.2 GB"]
    for told in ("3.49 GB less", "a tower of 0.68 GB", "0.27 GB less", "a hill of 2.15 GB and a tower of 2.21 GB"):
        assert told in alt


@pytest.mark.parametrize("name", LLAMAS)
def test_peaks_and_savings_are_those_of_the_other_tables(name: str) -> None:
    found, world = hills_and_towers(*LLAMAS[name]), peaked_world(*LLAMAS[name])
    saved, borrowed = weigh_updates(*LLAMAS[name])
    assert found["AdamW"].highest is found["AdamW"].hill
    assert found["AdamW"].highest.top == world.adamw
    assert {column: found[column].highest.top - world.adamw for column in PLANNED} == world.beyond
    muon = found["matrix by matrix"]
    assert muon.tower.height == borrowed["matrix by matrix"]
    assert muon.hill.height == found["AdamW"].hill.height
    assert found["AdamW"].hill.ground - muon.hill.ground == pytest.approx(saved, rel=1e-5)


# ---- As tokens grow ---------------------------------------------------------------------------------------


def test_frames_share_a_scale_a_size_and_a_floor() -> None:
    few, many = (frame.figure for frame in frames_of_hills(WORLDS, "owner"))
    assert tuple(few.get_size_inches()) == tuple(many.get_size_inches())
    high, low = extent(few, "hill-high-AdamW"), extent(many, "hill-low-AdamW")
    assert high.height / 8 == pytest.approx(low.height / 3)
    floors = [extent(figure, f"ground-{name}-Muon").y1 for figure, name in ((few, "high"), (many, "low"))]
    assert floors[0] == pytest.approx(floors[1])


def test_with_more_tokens_the_hill_rises_past_the_tower() -> None:
    batches = hills_of_batches(results.load("memory"))
    frames = frames_of_hills({f"{tokens} tokens": peaks for tokens, peaks in batches.items()}, "flat")
    captions = [frame.caption for frame in frames]
    assert "its tower, 9.7 MB above" in captions[0]
    assert all("its hill, 3.2 MB below" in caption for caption in captions[1:])
    towers = {peaks["flat"].tower for peaks in batches.values()}
    assert len(towers) == 1  # tokens do not touch it
    hills = [peaks["flat"].hill.height for peaks in batches.values()]
    assert hills == sorted(hills)
    for frame in frames:
        assert_readable(frame.figure)
